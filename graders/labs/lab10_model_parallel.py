"""The steps of lab 10: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. Where a number is wrong, it is compared
with the numbers that the common mistakes give, and the one that it equals names the hint.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) would, in every process
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F

from graders.runner import Group, Judge, Lesson
from graders.tools import Lab, Wrong, ask, named, near, same, verdict

HINTS = {
    "lines_kind": 'lines() returns a dict with the keys "pp", "dp" and "tp", each with a list '
    "of lists of int.",
    "lines_partition": "The groups of one kind must hold every rank exactly once, in lines as "
    "long as that axis of the box.",
    "tp_neighbours": "Ranks of a tp group must be neighbours in number, for these share the "
    "fastest links: tp is the last axis of the box, the fastest to change.",
    "axes_swapped": "The box is [pp, dp, tp], in this order: a stage is a block of "
    "neighbouring ranks, and the replicas are within it.",
    "new_group_by_all": "dist.new_group is called by every rank for every group, in the same "
    "order, also for the groups the rank is not in. Make all of them, keep yours.",
    "wrong_group": "join() must return the group that this rank is in. new_group gives a "
    "rank outside of the group something that is no group.",
    "f_forward": "f does nothing in forward: every rank has the whole x already. Its "
    "all-reduce is in backward.",
    "f_backward": "In backward of f every rank holds one term of the gradient of x, from its "
    "own shard. Sum them over the tp group.",
    "g_forward": "In forward of g every rank holds one part of the sum. Add them up over the "
    "tp group.",
    "g_backward": "g does nothing in backward: each part enters the sum once, so its gradient "
    "is the gradient of the sum, which every rank has. Summed again it is t times too large.",
    "not_tp_group": "You reduced over all ranks. Without a group, dist.all_reduce takes the "
    "default one: pass the tp group.",
    "in_place": "The argument was overwritten, which others may still need. dist.all_reduce "
    "works in place: reduce a copy, as all_reduced does.",
    "gradient_count": "backward returns one gradient for each argument of forward: that of the "
    "tensor, and None for the group.",
    "no_pieces": "Set self.weight and self.bias in __init__: cut() makes a piece, whole() a "
    "copy.",
    "column_dim": "nn.Linear keeps its weight as [out, in], the transpose of A in xA. Columns "
    "of A are rows of weight: dimension 0.",
    "column_bias": "The bias of a column-parallel layer has one number for each output: cut it "
    "as the outputs are.",
    "row_dim": "A row-parallel layer takes a part of the inputs, and weight is [out, in]: cut "
    "dimension 1.",
    "row_bias": "The output of a row-parallel layer is whole, and so is its bias: whole(), "
    "not cut().",
    "not_marked": "A piece must carry is_cut, which cut() sets, and a whole parameter must "
    "not: step 8 counts by it. nn.Parameter(cut(...)) makes a new one without it.",
    "column_input": "x goes whole into every shard, so its gradient is a sum over the shards: "
    "copy_to_shards(x, self.grid) belongs where x enters.",
    "column_summed": "A column-parallel layer needs no sum in forward: its output is complete, "
    "in columns.",
    "row_not_summed": "Each rank has its own part of the output. sum_over_shards must add the "
    "parts up.",
    "bias_each": "The bias was added on every rank before the sum, and counts t times. (A "
    "t-th of it on each would give the right output, and a t-th of its gradient.) Add it once, "
    "to the finished sum.",
    "shard_gradient": "The output is right and a gradient is not. Let autograd see the sum "
    "through sum_over_shards, whose backward does nothing, and cut nothing off by detach.",
    "heads_mixed": "Cut as it stands, the fused matrix gives one rank queries and another one "
    "values. In each of tp equal pieces there must be q, k and v of the same heads.",
    "per_head": "A piece must hold all its queries, then all its keys, then all its values, as "
    "chunk(3) in forward expects: group by shard, not by head.",
    "not_an_order": "rows_by_shard must return each of the 3h row numbers once.",
    "local_heads": "A rank has HEADS / tp heads, each as wide as before. With all HEADS, each "
    "becomes narrower and sees numbers of others.",
    "not_causal": "A token sees tokens that come after it: is_causal=True.",
    "own_maximum": "Each rank subtracts a maximum of its own, and sums with different shifts "
    "cannot be added. Reduce it over the tp group with ReduceOp.MAX.",
    "overflow": "exp overflows: subtract the largest logit of the whole vocabulary first.",
    "total_not_summed": "The sum of exponentials covers this rank's part of the vocabulary "
    "only: sum_over_shards.",
    "target_not_masked": "Ranks that do not have the target contribute something else. Of the "
    "tp ranks exactly one has it; what the others find must count 0.",
    "target_offset": "Targets count over the whole vocabulary, and columns over this rank's "
    "part: subtract grid.shard * width.",
    "target_not_summed": "The target's logit is on one rank, and all need it: sum_over_shards.",
    "loss_not_mean": "Return the mean over all positions.",
    "loss_gradient": "The loss is right and its gradient is not. all_reduced carries no "
    "gradient (good for the maximum): both sums need sum_over_shards.",
    "layers": "Each stage holds LAYERS / pp layers in a row, and together they hold all.",
    "group_rank": "Stages are places within the pp group, not ranks of the whole run: pass "
    "group_dst= and group_src=, where dst= and src= count over all ranks.",
    "leaf": "The received activation has no gradient to send back. It comes without history: "
    "call requires_grad_() on it before the stage uses it.",
    "start_gradient": "Only the loss, one number, can start backward by itself. The other "
    "stages go on from what they receive: output.backward(gradient).",
    "detached": "The output that is kept has lost its graph. Detach what is sent, not what "
    "backward will need.",
    "loss_not_divided": "The means of m micro-batches are added up. Divide each loss by m, "
    "which is self.m.",
    "loss_not_added": "The gradients are right and self.loss is not: add each micro-batch's "
    "loss, divided by m and detached, to it in the last stage.",
    "sent_back": "The last stage's gradients are right, those of the stages before are not. "
    "What goes back is the gradient of the stage's input, taken.grad.",
    "each_once": "The schedule must call forward and backward once for every micro-batch.",
    "not_gpipe": "GPipe runs all forwards before the first backward.",
    "not_forgotten": "Micro-batches are still live after their backward: pop them, or their "
    "activations stay in memory.",
    "not_kept": "isend has only started when it returns. Keep its Work and the tensor in "
    "self.sends: finish() waits for them, and until then the memory must not be given away.",
    "pipeline_stuck": "The stages wait for each other. Every send needs its receive on the "
    "other side: activations from stage - 1, gradients from stage + 1, each in its group.",
    "blocking_send": "A stage waits in send for its neighbour to receive, and the neighbour in "
    "its own send. Start sends with dist.isend, which does not wait.",
    "not_1f1b": "All forwards come before all backwards: that is GPipe, with m micro-batches "
    "live. After the warm-up, each forward is followed by a backward.",
    "warm_up_long": "The warm-up is too long, and one more micro-batch is live than necessary. "
    "In stage i it is p - 1 - i forwards; the forward of the first pair comes after it.",
    "warm_up_short": "The warm-up is too short: the stage waits for a gradient where it could "
    "have run a forward. In stage i it is p - 1 - i forwards.",
    "warm_up_backwards": "The last stage can start with a backward at once, the first one has "
    "to wait longest: the warm-up gets shorter from stage to stage.",
    "few_micro_batches": "With fewer micro-batches than the warm-up asks for, all of them are "
    "warm-up: take the smaller number.",
    "backward_order": "Micro-batches go back in the order in which they went forward.",
    "share_by_rank": "Ranks of one replica got different samples. The stages and shards of a "
    "replica work on the same: cut the batch in grid.dp parts, by grid.replica.",
    "share_same": "All replicas work on the same samples: where does grid.replica enter?",
    "share_lost": "Some samples are read by nobody, or the replicas' shares are not equal.",
    "averaged_over_all": "The gradients were mixed with those of other parameters. The same "
    "parameter is on the ranks of the dp group alone: pass group=grid.dp_group.",
    "average_divisor": "The sum goes over the replicas: divide it by grid.dp, no more and no "
    "less.",
    "not_averaged": "Gradients are still those of this replica's samples alone. Every "
    "parameter needs its average, the whole ones too.",
    "whole_reduced": "A parameter that is whole on every rank of the tp group has its whole "
    "gradient there already: only average it over the replicas.",
    "norm_local": "This is the norm of what this rank holds. The squares must be added up over "
    "the tp group and over the pp group.",
    "norm_one_axis": "The squares were added up along one axis only: both shards and stages "
    "hold parts of the model.",
    "norm_copies": "Whole parameters were counted once for each rank of the tp group, which "
    "hold copies of them. Let one shard count them.",
    "norm_replicas": "The replicas were counted too, and they hold the same gradients again. "
    "Add up over tp and pp, not over all ranks.",
    "norm_missed": "Whole parameters were not counted at all: one shard must count them.",
    "norm_of_norms": "Norms cannot be added, squares can: reduce the sum of squares, and take "
    "the square root at the end.",
    "not_clipped": "The norm is right, and the gradients are not scaled by limit / norm.",
    "clip_grows": "A gradient below the limit was made longer. Scale by limit / norm only if "
    "that is below 1.",
    "other": "The numbers fit no common mistake. Try one rank first, then two; print one "
    "tensor before and after, on every rank.",
}


LAB = Lab(HINTS)
DTYPE, TIGHT = torch.float64, (1e-6, 1e-9)


# --- how tensors are explained ------------------------------------------------------------


def expect(
    what: str, found: Any, right: torch.Tensor, hint: str = "other",
    known: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Raise `Wrong` unless a tensor of this rank is the right one.

    `known`: what common mistakes give, by name; as (tensor, hint) if it is not `hint`.
    """
    known = {"right": right, **(known or {})}
    known = {n: each if isinstance(each, tuple) else (each, hint) for n, each in known.items()}
    name = next((n for n, (each, _) in known.items() if same(found, each, *TIGHT)), None)
    name = name or kind_of(found, right.shape)
    what = f"{what} of rank {dist.get_rank()} is wrong ({name})"
    ask(name == "right", what, known.get(name, (None, hint))[1])


def kind_of(found: Any, shape: torch.Size) -> str:
    """What can be said of a tensor that is not of this shape, or not known."""
    if not isinstance(found, torch.Tensor):
        return "none" if found is None else f"a {type(found).__name__}"
    if found.shape != shape:
        return "shape " + "×".join(map(str, found.shape))
    return "other" if found.isfinite().all() else "infinite"


def gathered(value: Any) -> list[Any]:
    """What every rank has here, in rank order. It is not among the calls that are recorded."""
    everybody: list[Any] = [None] * dist.get_world_size()
    distributed_c10d.all_gather_object(everybody, value)
    return everybody


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


# --- step 1 -------------------------------------------------------------------------------

KINDS = {"tp": "tp_neighbours", "pp": "axes_swapped", "dp": "axes_swapped"}
BOXES = ((8, 2, 2), (8, 1, 4), (12, 3, 2), (4, 4, 1), (6, 1, 2))  # (world, pp, tp)


@LAB.step(
    1, "three kinds of groups",
    "the groups of every box are right, and all ranks make them together",
    "lines join", own="lines join Grid", worlds=(4, 8, 1),
)  # fmt: skip
def groups(module, lab, lesson):
    for box in BOXES:
        found = module.lines(*box)
        good = isinstance(found, dict) and set(found) == set(KINDS)
        ask(good, f"lines() returns a {type(found).__name__}", "lines_kind")
        check_lines(box, found, lab.lines(*box))
    yield "lines() finds the groups of every box"

    # join, first with a new_group that only takes notes
    n = lesson.world
    groups = torch.arange(n).view(max(n // 2, 1), -1).T.flip(0).tolist()
    made: list[list[int]] = []

    def note(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> list[int]:
        made.append(sorted(map(int, range(n) if ranks is None else ranks)))
        return made[-1]

    with mock.patch.object(dist, "new_group", note):
        kept = module.join(groups)
    notes = gathered((made, next((each for each in made if each is kept), [])))
    first, most = notes[0][0], len({tuple(group) for calls, _ in notes for group in calls})
    for rank, (calls, kept) in enumerate(notes):
        what = f"rank 0 makes the groups {first}, rank {rank} makes {calls}"
        ask(calls == first and len(calls) >= most, what, "new_group_by_all")
        ask(rank in kept, f"rank {rank} keeps the group {kept}", "wrong_group")
    pp = tp = min(n, 2)
    grid, rank, dp = module.Grid(pp, tp), lesson.rank, n // (pp * tp)
    place = [grid.stage, grid.replica, grid.shard]
    what = f"rank {rank} stands at stage, replica, shard {place}"
    ask(place == [rank // (dp * tp), rank // tp % dp, rank % tp], what, "axes_swapped")


def check_lines(box: tuple[int, int, int], found: dict, true: dict) -> None:
    """The groups of one box."""
    world, pp, tp = box
    found, true = (
        {kind: sorted(sorted(map(int, line)) for line in each[kind]) for kind in KINDS}
        for each in (found, true)
    )
    what = f"of {world} ranks with pp {pp} and tp {tp}, the {{}} groups are {{}}".format
    for kind in ("pp", "dp", "tp"):
        whole = sorted(itertools.chain(*found[kind])) == list(range(world))
        long = set(map(len, found[kind])) == set(map(len, true[kind]))
        ask(whole and long, what(kind, found[kind]), "lines_partition")
    for kind, hint in KINDS.items():
        ask(found[kind] == true[kind], what(kind, found[kind]), hint)


# --- step 2 -------------------------------------------------------------------------------


@LAB.step(
    2, "two conjugate operators",
    "f reduces in backward alone, g in forward alone, and both in the tp group",
    "CopyToShards SumOverShards copy_to_shards sum_over_shards", worlds=(4, 2, 1),
    crashes={"incorrect number of gradients": "gradient_count"},
)  # fmt: skip
def operators(module, lab, lesson):
    grid = lab.Grid(tp=min(lesson.world, 2))  # with 4 ranks: two groups of two
    terms = [random(3, 4, seed=rank) for rank in range(lesson.world)]
    mine, first = terms[lesson.rank], lesson.rank - grid.shard
    total, everybody = sum(terms[first : first + grid.tp]), sum(terms)
    x = random(3, 4, seed=100)
    of_x = {"summed": grid.tp * x, "world": (lesson.world * x, "not_tp_group")}
    of_terms = {"own": mine, "summed": total, "world": (everybody, "not_tp_group")}
    for name, apply, given, known, true, true_gradient in (
        ("f", module.copy_to_shards, x, of_x, x, total),
        ("g", module.sum_over_shards, mine, of_terms, total, mine),
    ):
        argument, gradient = given.clone().requires_grad_(), mine.clone()
        y = apply(argument, grid)
        expect(f"forward of {name}", y, true, f"{name}_forward", known)
        yield f"forward of {name}"
        intact = same(argument, given, *TIGHT)
        y.backward(gradient)
        found, hint = argument.grad, f"{name}_backward"
        expect(f"backward of {name}", found, true_gradient, hint, of_terms)
        yield f"backward of {name}"
        intact = intact and same(gradient, mine, *TIGHT)
        ask(intact, f"{name} overwrites its argument", "in_place")


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "a column and a row make an MLP",
    "both layers and the MLP have the outputs and gradients of the whole",
    "ColumnLinear RowLinear ParallelMLP", worlds=(2, 4, 1),
    crashes={"no attribute '(weight|bias)'": "no_pieces"},
)  # fmt: skip
def linear(module, lab, lesson):
    grid, full = lab.Grid(tp=lesson.world), lab.build_model().blocks[0].mlp
    t = grid.tp

    def whole(value: torch.Tensor) -> torch.Tensor:
        return value

    def mine(value: torch.Tensor, along: int = -1) -> torch.Tensor:
        return value.chunk(t, along)[grid.shard]

    column, row = module.ColumnLinear(full.up, grid), module.RowLinear(full.down, grid)
    layers = (  # name, layer, that of one process, where it is cut, what goes in and out
        ("Column", column, full.up, 0, whole, mine),
        ("Row", row, full.down, 1, mine, whole),
    )
    for name, layer, true, dim, _, out in layers:
        known = {"across": mine(true.weight, 1 - dim), "whole": true.weight}
        what, hint = f"the weight of {name}Linear", f"{name.lower()}_dim"
        expect(what, layer.weight, mine(true.weight, dim), hint, known)
        known = {"other": true.bias, "cut": mine(true.bias)}
        what, hint = f"the bias of {name}Linear", f"{name.lower()}_bias"
        expect(what, layer.bias, out(true.bias), hint, known)
        marks = [getattr(each, "is_cut", False) for each in (layer.weight, layer.bias)]
        what = f"is_cut in the {name.lower()} layer of rank {lesson.rank} is wrong (other)"
        ask(marks == [True, dim == 0], what, "not_marked")
    yield "both layers hold their pieces"

    for name, layer, true, dim, into, out in layers:
        x = random(2, lab.SEQUENCE, true.in_features)
        our_x, whole_x = (each.clone().requires_grad_() for each in (into(x), x))
        y, output = layer(our_x), true(whole_x)
        hint, known = "column_summed", {}
        if name == "Row":
            part, bias, hint = F.linear(into(x), layer.weight), true.bias.detach(), "other"
            known = {
                "own": (part, "row_not_summed"),
                "own with bias": (part + bias, "row_not_summed"),
                "no bias": (output - bias, "row_bias"),
                "bias t times": (output + (t - 1) * bias, "bias_each"),
            }
        expect(f"the output of {name}Linear", y, out(output), hint, known)
        upstream = random(*output.shape, seed=4)
        y.backward(out(upstream))
        output.backward(upstream)
        own, share = out(upstream) @ layer.weight.detach(), out(true.bias.grad)
        for what, found, right, known in (
            ("bias", layer.bias.grad, share, {"share": (share / t, "bias_each")}),
            ("input", our_x.grad, into(whole_x.grad), {"own": (own, "column_input")}),
            ("weight", layer.weight.grad, mine(true.weight.grad, dim), {}),
        ):
            what = f"the gradient of {name}Linear's {what}"
            expect(what, found, right, "shard_gradient", known)
        if name == "Column":
            yield "ColumnLinear has the outputs and gradients of the whole"
    x = random(2, lab.SEQUENCE, lab.HIDDEN)
    with lesson.phase("forward"):
        expect("the output of the MLP", module.ParallelMLP(full, grid)(x), full(x))


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "heads over ranks, and a whole block",
    "attention and a block have the outputs and gradients of the whole",
    "rows_by_shard ParallelAttention ParallelBlock", worlds=(2, 4, 1),
)  # fmt: skip
def attention(module, lab, lesson):
    order = torch.arange(3 * lab.HIDDEN)
    by_head = order.view(3, lab.HEADS, -1).transpose(0, 1).flatten()
    known = {"unchanged": order, "by_head": (by_head, "per_head")}
    for tp in (2, 4, 1):
        rows = torch.as_tensor(module.rows_by_shard(tp)).flatten()
        what = f"rows_by_shard({tp}) of rank {lesson.rank} is wrong (not an order)"
        ask(sorted(rows.tolist()) == order.tolist(), what, "not_an_order")
        expect(f"rows_by_shard({tp})", rows, lab.rows_by_shard(tp), "heads_mixed", known)
    yield "each piece of the fused matrix has q, k and v of its own heads"

    grid, full = lab.Grid(tp=lesson.world), lab.build_model().blocks[0]
    x = random(2, lab.SEQUENCE, lab.HIDDEN)
    ours = module.ParallelAttention(full.attention, grid)
    theirs, real = lab.ParallelAttention(full.attention, grid), F.scaled_dot_product_attention
    known = {}
    for name, hint, place, attribute, mistake in (
        ("too many heads", "local_heads", lab, "HEADS", lab.HEADS * grid.tp),
        (
            "not causal",
            "not_causal",
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, **_: real(q, k, v),
        ),
    ):
        with mock.patch.object(place, attribute, mistake):
            known[name] = theirs(x), hint
    expect("the output of attention", ours(x), full.attention(x), known=known)
    yield "attention has the output of the whole"

    block = module.ParallelBlock(full, grid)
    our_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with lesson.phase("forward and backward"):
        y, true = block(our_x), full(whole_x)
        expect("the output of the block", y, true)
        y.square().sum().backward()
    true.square().sum().backward()
    expect("the gradient of the input", our_x.grad, whole_x.grad, "shard_gradient")
    expected = lab.expected_gradients(full, lambda whole: lab.ParallelBlock(whole, grid))
    expected = dict(expected.named_parameters())
    wrong = [
        name
        for name, parameter in block.named_parameters()
        if name not in expected or not same(parameter.grad, expected[name], *TIGHT)
    ]
    what = f"a gradient of rank {lesson.rank} is wrong ({', '.join(wrong)})"
    ask(not wrong, what, "shard_gradient")


# --- step 5 -------------------------------------------------------------------------------


def mistaken_losses(
    z: torch.Tensor, targets: torch.Tensor, shard: int, tp: int
) -> dict[str, tuple[torch.Tensor, str]]:
    """What a shard computes if it makes certain mistakes, and the hints for them."""
    width = z.size(-1) // tp
    shifted = (z - z.amax(-1, keepdim=True)).chunk(tp, -1)
    by_own = [part - part.amax(-1, keepdim=True) for part in shifted]

    def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(part.exp().sum(-1) for part in parts).log()

    def target(
        parts: Sequence[torch.Tensor], offset: int = width, masked: bool = True
    ) -> list[torch.Tensor]:
        """What each of the ranks contributes."""
        found = []
        for rank, part in enumerate(parts):
            place = targets - rank * offset
            logit = part.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
            mine = (place >= 0) & (place < width)
            found.append(logit * mine if masked else logit)
        return found

    true, found = total(shifted), target(shifted)
    losses = {
        "own maximum": (total(by_own) - sum(target(by_own)), "own_maximum"),
        "total not summed": (total([shifted[shard]]) - sum(found), "total_not_summed"),
        "not masked": (true - sum(target(shifted, masked=False)), "target_not_masked"),
        "no offset": (true - sum(target(shifted, offset=0)), "target_offset"),
        "target not summed": (true - found[shard], "target_not_summed"),
        "not mean": (targets.numel() * (true - sum(found)), "loss_not_mean"),
        "infinite": (torch.tensor(math.inf), "overflow"),
    }
    return {name: (loss.mean(), hint) for name, (loss, hint) in losses.items()}


@LAB.step(
    5, "the loss without the logits",
    "loss and gradient are those of the whole vocabulary, and nothing overflows",
    "vocabulary_parallel_loss", worlds=(2, 4, 1),
)  # fmt: skip
def loss(module, lab, lesson):
    grid = lab.Grid(tp=lesson.world)
    z = 3 * random(2, 5, lab.VOCABULARY) + 900  # exp overflows without the maximum
    generator = torch.Generator().manual_seed(8)
    targets = torch.randint(lab.VOCABULARY, (2, 5), generator=generator)
    whole, mine = z.clone().requires_grad_(), lab.cut(z, -1, grid)
    true = lab.mean_loss(whole, targets)
    true.backward()
    with lesson.phase("loss"):
        loss = module.vocabulary_parallel_loss(mine, targets, grid)
    known = mistaken_losses(z, targets, grid.shard, grid.tp)
    expect("the loss", loss, true, known=known)
    yield "the loss is that of the whole vocabulary"
    if loss.requires_grad:
        loss.backward()
    true = lab.cut(whole.grad, -1, grid)
    expect("the gradient of the logits", mine.grad, true, "loss_gradient")


# --- steps 6 and 7 ------------------------------------------------------------------------

SENT: list[Any] = []


def watch_sends() -> None:
    """Let batch_isend_irecv know the watched calls; keep alive whatever is being sent.

    Until the process ends: a send that is forgotten would else arrive on some days only.
    """
    distributed_c10d.isend, distributed_c10d.irecv = dist.isend, dist.irecv
    real = dist.isend

    def isend(*args: Any, **kwargs: Any) -> Any:
        SENT.append((args, kwargs, work := real(*args, **kwargs)))
        return work

    dist.isend = distributed_c10d.isend = isend


@dataclass
class Run:
    """What one rank did in one step of a pipeline."""

    rank: int
    stage: int
    pp: int
    m: int
    events: list[str] = field(default_factory=list)  # F0 F1 B0 ..., as they begin
    live: int = 0  # micro-batches, at the end
    gradients: str = ""  # "right", or "times_m": m times too large
    loss: bool = False  # is right, in the last stage
    forgotten: bool = False  # sends were started, and none of them is kept

    def __str__(self) -> str:
        return " ".join(self.events or ["nothing"])

    @property
    def letters(self) -> str:
        return "".join(event[0] for event in self.events)

    @property
    def lead(self) -> int:
        """How many forwards come before the first backward."""
        return len(self.letters.partition("B")[0])

    @property
    def due(self) -> int:
        """How many should, in 1F1B."""
        return min(self.pp - self.stage, self.m)


def run_pipeline(
    module: ModuleType, lab: ModuleType, lesson: Lesson, schedule: Callable, pp: int, m: int
) -> list[Run]:
    """One step of a pipeline: what all ranks did, each micro-batch once in each direction.

    The calls are reported as they begin, for a pipeline that comes to no end.
    """
    lesson.fact("through", False)
    grid, full = lab.Grid(pp=pp), lab.build_model()
    tokens = lab.make_batches()[0]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    stage = lab.Stage(full, grid)
    pipe = module.Pipeline(stage, inputs.chunk(m), targets.chunk(m))
    run = Run(lesson.rank, grid.stage, pp, m)

    def logged(letter: str, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(k: int) -> None:
            if not 0 <= k < m:
                what = "forward" if letter == "F" else "backward"
                raise IndexError(f"{what}({k}) with {m} micro-batches")
            run.events.append(f"{letter}{k}")
            lesson.fact(f"m={m}", vars(run))
            if m == 8:
                lesson.fact("schedule", run.events)
            real(k)

        return call

    pipe.forward, pipe.backward = logged("F", pipe.forward), logged("B", pipe.backward)
    schedule(pipe)
    calls = {call.name for call in lesson.calls}
    run.forgotten = "isend" in calls and "send" not in calls and not pipe.sends
    pipe.finish()
    run.live = len(pipe.live)
    true = lab.mean_loss(full(inputs), targets)
    true.backward()
    run.loss = not grid.last or same(torch.as_tensor(pipe.loss), true, *TIGHT)
    true = list(lab.expected_gradients(full, lambda whole: lab.Stage(whole, grid)).parameters())
    found, m_times = [each.grad for each in stage.parameters()], [m * each for each in true]
    run.gradients = verdict(found, *TIGHT, right=true, times_m=m_times)
    lesson.fact("through", True)
    runs = gathered(run)
    due = sorted(f"{letter}{k}" for letter in "FB" for k in range(m))
    for run in runs:
        ask(sorted(run.events) == due, f"rank {run.rank} runs {run}", "each_once")
        what = f"{run.live} micro-batches are live at the end of rank {run.rank}"
        ask(not run.live, what, "not_forgotten")
        what = f"rank {run.rank} starts sends and keeps none of them"
        ask(not run.forgotten, what, "not_kept")
    return runs


def check_numbers(runs: list[Run]) -> Judge:
    """Gradients and loss."""
    m, pp = runs[0].m, runs[0].pp
    what = f"with {m} micro-batches the gradients are {m} times those of one process"
    ask(any(run.gradients != "times_m" for run in runs), what, "loss_not_divided")
    wrong = [run.stage for run in runs if run.gradients != "right"]
    if wrong:
        what = f"the gradients of stage {wrong[0]} are not those of one process"
        raise Wrong(what, "other" if pp - 1 in wrong else "sent_back")
    yield f"{pp} stages, {m} micro-batches: the gradients of one process"
    good = all(run.loss for run in runs)
    ask(good, "self.loss is not the loss of one process", "loss_not_added")


def check_leads(runs: list[Run]) -> None:
    """Raise `Wrong` if the stages did not warm up as in 1F1B, as far as they came."""
    m, first, last = runs[0].m, runs[0], runs[-1]
    gpipe = all(run.lead == m for run in runs)
    ask(not gpipe, f"stage 0 runs {first}", "not_1f1b")
    what = f"stage 0 runs {first.lead} forwards before its first backward, the last one"
    backwards = last.lead > last.due and first.lead < first.due
    ask(not backwards, f"{what} {last.lead}", "warm_up_backwards")
    for run in runs:
        what = f"with {m} micro-batches stage {run.stage} runs {run.lead} forwards before its"
        what += f" first backward, and {run.due} are due"
        ask(run.lead <= run.due, what, "warm_up_long")
        ask("B" not in run.letters or run.lead == run.due, what, "warm_up_short")


def stuck_in_pipeline(group: Group) -> None:
    """Why stages wait for each other."""
    sending = [
        str(r)
        for r, rank in enumerate(group.ranks)
        if any(call.name == "send" and not call.returned for call in rank.calls)
    ]
    ask(not sending, f"rank {', '.join(sending)} did not come out of send", "blocking_send")
    for m in (8, 2):
        runs = [Run(**fact) for fact in group.facts(f"m={m}") if fact]
        if len(runs) == group.world:
            check_leads(runs)
    waiting = [str(r) for r, through in enumerate(group.facts("through")) if not through]
    raise Wrong(f"rank {', '.join(waiting)} did not end", "pipeline_stuck")


PIPELINE = {
    "worlds": (2, 4, 1),
    "symmetric": False,
    "order_hint": "pipeline_stuck",
    "stuck": stuck_in_pipeline,
    "crashes": {
        "NoneType": "leaf",
        "implicitly created only for scalar": "start_gradient",
        "does not require grad": "detached",
        "not part of|not in group|Invalid rank|invalid rank": "group_rank",
        r"with \d+ micro-batches": "few_micro_batches",
    },
}


@LAB.step(
    6, "a pipeline",
    "GPipe has the loss and gradients of one process, in one pipeline and in two at once",
    "layers_of Pipeline gpipe", **PIPELINE,
)  # fmt: skip
def pipeline(module, lab, lesson):
    for pp in (1, 2, 4):
        layers = [list(module.layers_of(i, pp)) for i in range(pp)]
        good = layers == [list(lab.layers_of(i, pp)) for i in range(pp)]
        ask(good, f"with {pp} stages the layers are {layers}", "layers")
    watch_sends()
    for pp in (4, 2) if lesson.world == 4 else (lesson.world,):  # 2 of 4: groups 0 2 and 1 3
        runs = run_pipeline(module, lab, lesson, module.gpipe, pp, 4)
        for run in runs:
            what = f"rank {run.rank} runs {run}"
            ask(run.letters == "FFFFBBBB", what, "not_gpipe")
            ask(run.events[:4] == ["F0", "F1", "F2", "F3"], what, "each_once")
        yield from check_numbers(runs)


@LAB.step(
    7, "one forward, one backward",
    "1F1B has the loss and gradients of one process, with p - i micro-batches live",
    "layers_of Pipeline one_f_one_b", own="layers_of Pipeline gpipe one_f_one_b", needs=(6,),
    **PIPELINE,
)  # fmt: skip
def one_each(module, lab, lesson):
    watch_sends()
    for m in (8, 2):
        runs = run_pipeline(module, lab, lesson, module.one_f_one_b, lesson.world, m)
        check_leads(runs)
        for run in runs:
            what, lead = f"stage {run.stage} runs {run}", run.due - 1
            in_order = sorted(run.events, key=lambda event: event[0]) == sorted(run.events)
            ask(in_order, what, "backward_order")
            pairs = "F" * lead + "FB" * (m - lead) + "B" * lead
            ask(run.letters == pairs, what, "not_1f1b")
        yield from check_numbers(runs)


# --- step 8 -------------------------------------------------------------------------------

LAYOUTS = {1: (1, 1), 2: (1, 1), 4: (1, 2), 8: (2, 2)}  # world: (pp, tp), the rest is dp


def is_cut(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "is_cut", False))


def value(i: int, parameter: nn.Parameter, replica: int, shard: int) -> float:
    """What parameter i has as its gradient on a rank."""
    return i + 1 + 7.3 * replica + (100 * shard if is_cut(parameter) else 0)


@LAB.step(
    8, "all three",
    "data, gradients and norm go along their own axes, and three steps of training have "
    "the losses of one process",
    "my_share average_gradients clip_gradients train", worlds=(4, 8, 2, 1), symmetric=False,
)  # fmt: skip
def composition(module, lab, lesson):
    grid = lab.Grid(*LAYOUTS[lesson.world])
    place = grid.stage, grid.replica, grid.shard
    rows = torch.arange(16).view(16, 1).expand(16, 3).clone()
    share = torch.as_tensor(module.my_share(rows, grid))[:, 0].tolist()
    check_share(gathered((grid.replica, tuple(share))))
    yield "every replica has its share of the samples, the same on all of its ranks"

    stage = lab.Stage(lab.build_model(), grid)
    parameters = list(stage.parameters())
    for i, parameter in enumerate(parameters):
        own = value(i, parameter, grid.replica, grid.shard)
        parameter.grad = torch.full_like(parameter, own)
    with lesson.phase("average"):
        module.average_gradients(stage, grid)
    check_average(lesson, grid, parameters)
    yield "gradients are averaged over the replicas"

    owns = [value(i, each, 0, grid.shard) / 100 for i, each in enumerate(parameters)]
    squares = [0.0, 0.0]  # whole, cut
    for parameter, own in zip(parameters, owns, strict=True):
        squares[is_cut(parameter)] += parameter.numel() * own**2
    for limit in (1.0, 1e6):
        for parameter, own in zip(parameters, owns, strict=True):
            parameter.grad = torch.full_like(parameter, own)
        with lesson.phase("clip"):
            norm = module.clip_gradients(stage, grid, limit)
        what = f"clip_gradients returns nothing on rank {lesson.rank}"
        ask(norm is not None, what, "norm_local")
        norm = float(norm)
        if limit == 1.0:
            check_norm(lesson.rank, norm, gathered((place, squares)))
            yield "the norm is that of the whole model's gradient"
        pairs = zip(parameters, owns, strict=True)
        factors = [(parameter.grad.flatten()[0] / own).item() for parameter, own in pairs]
        due = min(1.0, limit / (norm + 1e-6))
        what = f"norm {norm:.4g}, limit {limit:g}: rank {lesson.rank} scales by"
        hint = "clip_grows" if limit > 1 and max(factors) > 1 else "not_clipped"
        good = all(near(factor, due, 1e-4) for factor in factors)
        ask(good, f"{what} {min(factors):.4g}", hint)

    batches = lab.make_batches()[:3]
    module.make_batches = lab.make_batches = lambda: batches
    losses, norms, _ = module.train(grid, torch.device("cpu"))
    true_losses, true_norms = lab.train_alone()
    what = f"in training the losses are {losses}, of one process {true_losses}"
    good = same([losses, norms], [true_losses, true_norms], 1e-5, 0)
    ask(good, what, "other")


def check_share(shares: list[tuple[int, tuple[int, ...]]]) -> None:
    """What the ranks read: (replica, rows) of each."""
    what = f"the ranks read {'; '.join(' '.join(map(str, share)) for _, share in shares)}"
    of = dict(shares)
    ask(all(of[replica] == share for replica, share in shares), what, "share_by_rank")
    ask(len(of) == 1 or len(set(of.values())) > 1, what, "share_same")
    ask(sorted(itertools.chain(*of.values())) == list(range(16)), what, "share_lost")
    ask(len(set(map(len, of.values()))) == 1, what, "share_lost")


def check_average(lesson: Lesson, grid: Any, parameters: list[nn.Parameter]) -> None:
    """Which ranks' gradients have been averaged, and by what have they been divided?"""
    replicas, shards, wrong = range(grid.dp), range(grid.tp), []
    for i, parameter in enumerate(parameters):
        over_dp = sum(value(i, parameter, r, grid.shard) for r in replicas)
        over_all = sum(value(i, parameter, r, s) for r in replicas for s in shards)
        known = {
            "right": over_dp / grid.dp,
            "own": value(i, parameter, grid.replica, grid.shard),
            "sum": over_dp,
            "divided by all": over_dp / lesson.world,
            "over all": over_all / (grid.dp * grid.tp),
            "over all, sum": over_all / grid.dp,
        }
        known = {name: torch.full_like(parameter, each) for name, each in known.items()}
        name = verdict(parameter.grad, *TIGHT, **known)
        wrong += [] if name == "right" else [(name, is_cut(parameter))]
    if wrong:
        kinds = {name for name, _ in wrong}
        what = f"of {len(parameters)} gradients on rank {lesson.rank} {len(wrong)} are wrong"
        what += f" ({', '.join(sorted(kinds))})"
        ask(kinds != {"own"}, what, "not_averaged")
        ask(any(cut for _, cut in wrong), what, "whole_reduced")
        ask(not kinds <= {"sum", "divided by all"}, what, "average_divisor")
        raise Wrong(what, "averaged_over_all")


def check_norm(rank: int, found: float, ranks: list[tuple[tuple, list[float]]]) -> None:
    """Which ranks' squares must have been added up to give what was returned?

    `ranks`: the place of each, and the squares of its whole and its cut parameters.
    """
    own, _ = ranks[rank]

    def total(axes: Sequence[int], copies: bool = False, whole: bool = True) -> float:
        """The norm over the ranks that differ from this one along these axes alone."""
        result = 0.0
        for place, (whole_part, cut_part) in ranks:
            if all(place[axis] == own[axis] for axis in range(3) if axis not in axes):
                counts = copies or place[2] == (0 if 2 in axes else own[2])
                result += cut_part + (whole_part if counts and whole else 0.0)
        return math.sqrt(result)

    true, here = total((0, 2)), own[2] == 0
    what = f"rank {rank} finds the norm {found:.4f}, that of the whole model is {true:.4f}"
    known = {
        "norm_local": [total(()), total((), whole=here)],
        "norm_copies": total((0, 2), copies=True),
        "norm_missed": total((0, 2), whole=False),
        "norm_replicas": [total((0, 1, 2)), total((0, 1, 2), copies=True)],
        "norm_one_axis": [total((2,)), total((0,)), total((0,), whole=here)],
    }
    hint = named(found, known)
    ask(near(found, true), what, "norm_of_norms" if hint == "other" else hint)
