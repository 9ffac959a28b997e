"""The steps of lab 10: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. Where a number is wrong, it is compared
with the numbers that the common mistakes give, and the one that it equals names the hint.
"""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
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

from graders.runner import Group, Lesson, Step, Wrong

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

DTYPE = torch.float64


# --- the finished lab, and how numbers are explained --------------------------------------


@functools.lru_cache
def finished() -> ModuleType:
    """The lab with its solutions."""
    path = Path(__file__).parent.parent / "lab10_model_parallel.py"
    spec = importlib.util.spec_from_file_location("finished_lab10", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batches = module.make_batches()[:3]
    module.make_batches = lambda: batches
    return module


def keep_only(lesson: Lesson, *own: str) -> tuple[ModuleType, ModuleType]:
    """Take all but these names from the finished lab; return the learner's lab and that."""
    lab = finished()
    for name, value in vars(lab).items():
        ours = getattr(value, "__module__", None) == lab.__name__ or name.isupper()
        if (ours or name == "make_batches") and name not in own:
            setattr(lesson.module, name, value)
    return lesson.module, lab


def same(a: Any, b: Any) -> bool:
    """Whether two tensors have one shape and agree but for rounding."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-6, atol=1e-9)


def verdict(ours: Any, **candidates: torch.Tensor) -> str:
    """The name of the first candidate that `ours` equals; its shape, or "other"."""
    if ours is None:
        return "none"
    for name, candidate in candidates.items():
        if same(ours, candidate):
            return name
    first = next(iter(candidates.values()))
    if not isinstance(ours, torch.Tensor):
        return f"a {type(ours).__name__}"
    if ours.shape != first.shape:
        return "shape " + "×".join(map(str, ours.shape))
    return "other" if ours.isfinite().all() else "infinite"


def expect(
    group: Group, fact: str, what: str, hints: dict[str, str], other: str = "other"
) -> None:
    """Raise `Wrong` unless every rank reports "right" for this fact."""
    for rank, found in enumerate(group.facts(fact)):
        if found != "right":
            found = found or "not reported"
            named = HINTS[hints.get(found, other)]
            raise Wrong(f"{what} of rank {rank} is wrong ({found})", named)


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


# --- step 1 -------------------------------------------------------------------------------

BOXES = ((8, 2, 2), (8, 1, 4), (12, 3, 2), (4, 4, 1), (6, 1, 2))  # (world, pp, tp)


def probe_groups(lesson: Lesson) -> None:
    module, _ = keep_only(lesson, "lines", "join", "Grid")
    for box in BOXES:
        found = module.lines(*box)
        if not isinstance(found, dict) or set(found) != {"pp", "dp", "tp"}:
            lesson.fact("kind", f"{type(found).__name__}")
            return
        plain = {
            kind: [list(map(int, line)) for line in groups] for kind, groups in found.items()
        }
        lesson.fact(f"lines {box}", plain)

    # join, first with a new_group that only takes notes
    n, rank = lesson.world, lesson.rank
    groups = torch.arange(n).view(max(n // 2, 1), -1).T.flip(0).tolist()
    made: list[list[int]] = []
    handles: list[object] = []

    def note(ranks: Sequence[int] | None = None, *_: Any, **__: Any) -> object:
        made.append(sorted(map(int, ranks if ranks is not None else range(n))))
        handles.append(object())
        return handles[-1]

    with mock.patch.object(dist, "new_group", note):
        returned = module.join(groups)
    kept = [made[i] for i, handle in enumerate(handles) if handle is returned]
    good = made == groups and bool(kept) and rank in kept[0]
    lesson.fact("made", made)
    lesson.fact("kept", kept[0] if kept else [])
    everybody: list[bool | None] = [None] * n
    dist.all_gather_object(everybody, good)
    right = [lesson_lines(*box) == normal(module.lines(*box)) for box in BOXES]
    if all(everybody) and all(right):
        pp, tp = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 2)}[n]
        grid = module.Grid(pp, tp)
        lesson.fact("place", [grid.stage, grid.replica, grid.shard])


def normal(lines: dict) -> dict[str, list[list[int]]]:
    """Groups without an order among or within them."""
    return {
        kind: sorted(sorted(map(int, line)) for line in groups)
        for kind, groups in lines.items()
    }


def lesson_lines(world: int, pp: int, tp: int) -> dict[str, list[list[int]]]:
    return normal(finished().lines(world, pp, tp))


def judge_groups(group: Group, right: Callable[[str], None]) -> None:
    if group.facts("kind")[0] is not None:
        raise Wrong(f"lines() returns a {group.facts('kind')[0]}", HINTS["lines_kind"])
    for box in BOXES:
        found, true = normal(group.facts(f"lines {box}")[0]), lesson_lines(*box)
        world, pp, tp = box
        sizes = {"pp": pp, "dp": world // (pp * tp), "tp": tp}
        for kind, size in sizes.items():
            flat = [rank for line in found[kind] for rank in line]
            whole = sorted(flat) == list(range(world))
            what = f"of {world} ranks with pp {pp} and tp {tp}, the {kind} groups are"
            what = f"{what} {found[kind]}"
            if (
                kind == "tp"
                and whole
                and any(
                    line != list(range(line[0], line[0] + len(line))) for line in found["tp"]
                )
            ):
                raise Wrong(what, HINTS["tp_neighbours"])
            if whole and {len(line) for line in found[kind]} != {size}:
                raise Wrong(what, HINTS["lines_partition"])
            if not whole:
                raise Wrong(what, HINTS["lines_partition"])
        for kind in ("tp", "pp", "dp"):
            if found[kind] != true[kind]:
                what = f"of {world} ranks with pp {pp} and tp {tp}, the {kind} groups are"
                tangled = kind == "tp"
                hint = HINTS["tp_neighbours" if tangled else "axes_swapped"]
                raise Wrong(f"{what} {found[kind]}", hint)
    right("lines() finds the groups of every box")
    made = group.facts("made")
    for rank, (calls, kept) in enumerate(zip(made, group.facts("kept"), strict=True)):
        if calls != made[0] or len(calls) < len({tuple(c) for m in made for c in m}):
            what = f"rank 0 makes the groups {made[0]}, rank {rank} makes {calls}"
            raise Wrong(what, HINTS["new_group_by_all"])
        if rank not in kept:
            raise Wrong(f"rank {rank} keeps the group {kept}", HINTS["wrong_group"])
    for rank, place in enumerate(group.facts("place")):
        n = group.world
        pp, tp = {1: (1, 1), 2: (1, 2), 4: (2, 2), 8: (2, 2)}[n]
        dp = n // (pp * tp)
        if place != [rank // (dp * tp), rank // tp % dp, rank % tp]:
            what = f"rank {rank} stands at stage, replica, shard {place}"
            raise Wrong(what, HINTS["axes_swapped"])


# --- step 2 -------------------------------------------------------------------------------


def probe_operators(lesson: Lesson) -> None:
    names = "CopyToShards", "SumOverShards", "copy_to_shards", "sum_over_shards"
    module, lab = keep_only(lesson, *names)
    grid = lab.Grid(tp=min(lesson.world, 2))  # with 4 ranks: two groups of two
    terms = [random(3, 4, seed=rank) for rank in range(lesson.world)]
    mine, first = terms[lesson.rank], lesson.rank - grid.shard
    total, everybody = sum(terms[first : first + grid.tp]), sum(terms)
    same_x = random(3, 4, seed=100)
    for name, apply in (("f", module.copy_to_shards), ("g", module.sum_over_shards)):
        before = same_x if name == "f" else mine
        x = before.clone().requires_grad_()
        y = apply(x, grid)
        if name == "f":
            seen = verdict(
                y, right=before, summed=grid.tp * before, world=lesson.world * before
            )
        else:
            seen = verdict(y, right=total, own=mine, world=everybody)
        lesson.fact(f"{name} forward", seen)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            return
        intact = same(x, before)
        gradient = mine.clone()
        y.backward(gradient)
        if name == "f":
            seen = verdict(x.grad, right=total, own=mine, world=everybody)
        else:
            seen = verdict(x.grad, right=mine, summed=total, world=everybody)
        lesson.fact(f"{name} backward", seen)
        lesson.fact(f"{name} intact", intact and same(gradient, mine))


def judge_operators(group: Group, right: Callable[[str], None]) -> None:
    for name in ("f", "g"):
        for where in ("forward", "backward"):
            hint = f"{name}_{where}"
            expect(
                group, f"{name} {where}", f"{where} of {name}", {"world": "not_tp_group"}, hint
            )
            right(f"{where} of {name}")
        if not all(group.facts(f"{name} intact")):
            raise Wrong(f"{name} overwrites its argument", HINTS["in_place"])


# --- step 3 -------------------------------------------------------------------------------


def pieces(
    lesson: Lesson, name: str, layer: nn.Module, full: nn.Linear, grid: Any, dim: int
) -> bool:
    """Report how a layer was cut; True if rightly."""

    def part(x: torch.Tensor, along: int) -> torch.Tensor:
        return x.chunk(grid.tp, along)[grid.shard]

    weight = verdict(
        layer.weight,
        right=part(full.weight, dim),
        across=part(full.weight, 1 - dim),
        whole=full.weight,
    )
    cut_bias = part(full.bias, 0)
    bias = verdict(layer.bias, right=cut_bias if dim == 0 else full.bias, other=full.bias,
                   cut=cut_bias)  # fmt: skip
    lesson.fact(f"{name} weight", weight)
    lesson.fact(f"{name} bias", bias)
    marks = [getattr(layer.weight, "is_cut", False), getattr(layer.bias, "is_cut", False)]
    good = marks == [True, dim == 0]
    lesson.fact(f"{name} marks", "right" if good else "other")
    return weight == bias == "right"


def probe_linear(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "ColumnLinear", "RowLinear", "ParallelMLP")
    grid, full = lab.Grid(tp=lesson.world), lab.build_model().blocks[0].mlp
    x, t = random(2, lab.SEQUENCE, lab.HIDDEN), grid.tp

    column, row = module.ColumnLinear(full.up, grid), module.RowLinear(full.down, grid)
    good = pieces(lesson, "column", column, full.up, grid, 0)
    if not (pieces(lesson, "row", row, full.down, grid, 1) and good):
        return

    def mine(value: torch.Tensor) -> torch.Tensor:
        return value.chunk(t, -1)[grid.shard]

    whole_x, our_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    hidden = full.up(whole_x)
    upstream = random(*hidden.shape, seed=4)
    y = column(our_x)
    lesson.fact("column output", verdict(y, right=mine(hidden)))
    if y.shape == mine(hidden).shape:
        y.backward(mine(upstream))
        hidden.backward(upstream)
        own = mine(upstream) @ column.weight.detach()
        seen = verdict(our_x.grad, right=whole_x.grad, own=own)
        lesson.fact("column input gradient", seen)
        seen = verdict(column.weight.grad, right=full.up.weight.grad.chunk(t)[grid.shard])
        lesson.fact("column weight gradient", seen)

    z = random(*hidden.shape, seed=5)
    our_z, whole_z = mine(z).clone().requires_grad_(), z.clone().requires_grad_()
    output = full.down(whole_z)
    y, bias = row(our_z), full.down.bias.detach()
    part = F.linear(mine(z), row.weight)
    candidates = {"own": part, "own with bias": part + bias, "no bias": output - bias}
    candidates |= {"bias t times": output + (t - 1) * bias}
    lesson.fact("row output", verdict(y, right=output, **candidates))
    if y.shape != output.shape:
        return
    upstream = random(*output.shape, seed=6)
    y.backward(upstream)
    output.backward(upstream)
    true, gradient = full.down.bias.grad, row.bias.grad
    lesson.fact("row bias gradient", verdict(gradient, right=true, share=true / t))
    lesson.fact("row input gradient", verdict(our_z.grad, right=mine(whole_z.grad)))
    true = full.down.weight.grad.chunk(t, 1)[grid.shard]
    lesson.fact("row weight gradient", verdict(row.weight.grad, right=true))

    mlp = module.ParallelMLP(full, grid)
    lesson.fact("mlp", verdict(mlp(x), right=full(x)))


def judge_linear(group: Group, right: Callable[[str], None]) -> None:
    what = "the weight of ColumnLinear"
    expect(group, "column weight", what, {}, "column_dim")
    expect(group, "column bias", "the bias of ColumnLinear", {}, "column_bias")
    expect(group, "row weight", "the weight of RowLinear", {}, "row_dim")
    expect(group, "row bias", "the bias of RowLinear", {}, "row_bias")
    for name in ("column", "row"):
        expect(group, f"{name} marks", f"is_cut in the {name} layer", {}, "not_marked")
    right("both layers hold their pieces")
    what = "the output of ColumnLinear"
    expect(group, "column output", what, {}, "column_summed")
    what = "the gradient of ColumnLinear's input"
    expect(group, "column input gradient", what, {"own": "column_input"}, "shard_gradient")
    what = "the gradient of ColumnLinear's weight"
    expect(group, "column weight gradient", what, {}, "shard_gradient")
    right("ColumnLinear has the outputs and gradients of the whole")
    known = {"own": "row_not_summed", "own with bias": "row_not_summed"}
    known |= {"bias t times": "bias_each", "no bias": "row_bias"}
    expect(group, "row output", "the output of RowLinear", known)
    what = "the gradient of RowLinear's bias"
    expect(group, "row bias gradient", what, {"share": "bias_each"}, "shard_gradient")
    for name in ("input", "weight"):
        what = f"the gradient of RowLinear's {name}"
        expect(group, f"row {name} gradient", what, {}, "shard_gradient")
    expect(group, "mlp", "the output of the MLP", {})


# --- step 4 -------------------------------------------------------------------------------


def attend(attention: Any, x: torch.Tensor, heads: int, causal: bool) -> torch.Tensor:
    """Attention of a finished ParallelAttention with another number of heads, or not causal."""
    q, k, v = (
        part.unflatten(-1, (heads, -1)).transpose(1, 2)
        for part in attention.qkv(x).chunk(3, -1)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return attention.out(y.transpose(1, 2).flatten(2))


def probe_attention(lesson: Lesson) -> None:
    names = "rows_by_shard", "ParallelAttention", "ParallelBlock"
    module, lab = keep_only(lesson, *names)
    three_h, good = 3 * lab.HIDDEN, True
    for tp in (2, 4, 1):
        rows = torch.as_tensor(module.rows_by_shard(tp)).flatten()
        true = lab.rows_by_shard(tp)
        by_head = torch.arange(three_h).view(3, lab.HEADS, -1).transpose(0, 1).flatten()
        seen = verdict(rows, right=true, unchanged=torch.arange(three_h), by_head=by_head)
        if seen != "right" and sorted(rows.tolist()) != list(range(three_h)):
            seen = "not an order"
        lesson.fact(f"rows {tp}", seen)
        good = good and seen == "right"
    if not good:
        return
    grid, full = lab.Grid(tp=lesson.world), lab.build_model().blocks[0]
    x = random(2, lab.SEQUENCE, lab.HIDDEN)
    ours = module.ParallelAttention(full.attention, grid)
    with torch.no_grad():
        theirs = lab.ParallelAttention(full.attention, grid)
        candidates = {
            "too many heads": attend(theirs, x, lab.HEADS, True),
            "not causal": attend(theirs, x, lab.HEADS // grid.tp, False),
        }
        true = full.attention(x)
    y = ours(x)
    lesson.fact("attention", verdict(y, right=true, **candidates))
    if not same(y, true):
        return
    block = module.ParallelBlock(full, grid)
    our_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, true = block(our_x), full(whole_x)
    lesson.fact("block", verdict(y, right=true))
    if not same(y, true):
        return
    y.square().sum().backward()
    true.square().sum().backward()
    lesson.fact("input gradient", verdict(our_x.grad, right=whole_x.grad))
    expected = lab.expected_gradients(full, lambda whole: lab.ParallelBlock(whole, grid))
    expected = dict(expected.named_parameters())
    wrong = [
        name
        for name, parameter in block.named_parameters()
        if name not in expected or not same(parameter.grad, expected[name])
    ]
    lesson.fact("gradients", "right" if not wrong else ", ".join(wrong))


def judge_attention(group: Group, right: Callable[[str], None]) -> None:
    known = {"unchanged": "heads_mixed", "by_head": "per_head", "not an order": "not_an_order"}
    for tp in (2, 4, 1):
        what = f"rows_by_shard({tp})"
        expect(group, f"rows {tp}", what, known, "heads_mixed")
    right("each piece of the fused matrix has q, k and v of its own heads")
    known = {"too many heads": "local_heads", "not causal": "not_causal"}
    expect(group, "attention", "the output of attention", known)
    right("attention has the output of the whole")
    expect(group, "block", "the output of the block", {})
    expect(group, "input gradient", "the gradient of the input", {}, "shard_gradient")
    expect(group, "gradients", "a gradient", {}, "shard_gradient")


# --- step 5 -------------------------------------------------------------------------------


def loss_by_mistake(
    z: torch.Tensor, targets: torch.Tensor, shard: int, tp: int, mistake: str
) -> torch.Tensor:
    """What rank `shard` computes if it makes a certain mistake."""
    parts = z.chunk(tp, -1)
    width = parts[0].size(-1)
    highest = [z.amax(-1)] * tp
    if mistake == "own maximum":
        highest = [part.amax(-1) for part in parts]
    shifted = [part - top.unsqueeze(-1) for part, top in zip(parts, highest, strict=True)]
    total = sum(part.exp().sum(-1) for part in shifted)
    if mistake == "total not summed":
        total = shifted[shard].exp().sum(-1)
    found = []
    for r, part in enumerate(shifted):
        place = targets - (0 if mistake == "no offset" else r * width)
        here = (place >= 0) & (place < width)
        logit = part.gather(-1, place.clamp(0, width - 1).unsqueeze(-1)).squeeze(-1)
        found.append(logit if mistake == "not masked" else logit * here)
    target = found[shard] if mistake == "target not summed" else sum(found)
    loss = total.log() - target
    return loss.sum() if mistake == "not mean" else loss.mean()


MISTAKES = {
    "own maximum": "own_maximum",
    "total not summed": "total_not_summed",
    "not masked": "target_not_masked",
    "no offset": "target_offset",
    "target not summed": "target_not_summed",
    "not mean": "loss_not_mean",
}


def probe_loss(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "vocabulary_parallel_loss")
    grid = lab.Grid(tp=lesson.world)
    z = 3 * random(2, 5, lab.VOCABULARY) + 900  # exp overflows without the maximum
    generator = torch.Generator().manual_seed(8)
    targets = torch.randint(lab.VOCABULARY, (2, 5), generator=generator)
    whole = z.clone().requires_grad_()
    true = lab.mean_loss(whole, targets)
    true.backward()
    mine = lab.cut(z, -1, grid)
    loss = module.vocabulary_parallel_loss(mine, targets, grid)
    wrong = {name: loss_by_mistake(z, targets, grid.shard, grid.tp, name) for name in MISTAKES}
    lesson.fact("loss", verdict(loss, right=true, **wrong))
    if not same(loss, true):
        return
    gradient = None
    if loss.requires_grad:
        loss.backward()
        gradient = mine.grad
    lesson.fact("gradient", verdict(gradient, right=lab.cut(whole.grad, -1, grid)))


def judge_loss(group: Group, right: Callable[[str], None]) -> None:
    expect(group, "loss", "the loss", {**MISTAKES, "infinite": "overflow"})
    right("the loss is that of the whole vocabulary")
    expect(group, "gradient", "the gradient of the logits", {}, "loss_gradient")


# --- steps 6 and 7 ------------------------------------------------------------------------

SENT: list[Any] = []


def run_pipeline(lesson: Lesson, name: str, schedule: Callable, pp: int, m: int) -> None:
    """One step of a pipeline: report the calls as they begin, and the results."""
    module, lab = lesson.module, finished()
    grid, full = lab.Grid(pp=pp), lab.build_model()
    tokens = lab.make_batches()[0]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    stage = lab.Stage(full, grid)
    pipe = module.Pipeline(stage, inputs.chunk(m), targets.chunk(m))
    events: list[str] = []
    lesson.fact(f"{name} stage", [grid.stage, grid.pp, m])

    def logged(letter: str, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(k: int) -> None:
            if not 0 <= k < m:
                what = "forward" if letter == "F" else "backward"
                raise IndexError(f"{what}({k}) with {m} micro-batches")
            events.append(f"{letter}{k}")
            lesson.fact(f"{name} events", events)
            real(k)

        return call

    pipe.forward, pipe.backward = logged("F", pipe.forward), logged("B", pipe.backward)
    before = lesson.calls
    schedule(pipe)
    lesson.fact(f"{name} calls", lesson.calls - before)
    lesson.fact(f"{name} kept", len(pipe.sends))
    pipe.finish()
    lesson.fact(f"{name} live", len(pipe.live))
    true = lab.mean_loss(full(inputs), targets)
    true.backward()
    if grid.last:
        loss = torch.as_tensor(pipe.loss)
        seen = verdict(loss, right=true, times_m=m * true, zero=torch.zeros_like(true))
        lesson.fact(f"{name} loss", seen)
    expected = dict(
        lab.expected_gradients(full, lambda whole: lab.Stage(whole, grid)).named_parameters()
    )
    seen = {
        verdict(parameter.grad, right=expected[key], times_m=m * expected[key])
        for key, parameter in stage.named_parameters()
    }
    lesson.fact(f"{name} gradients", seen.pop() if len(seen) == 1 else "other")


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


def probe_gpipe(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "layers_of", "Pipeline", "gpipe")
    layers = {pp: [list(module.layers_of(i, pp)) for i in range(pp)] for pp in (1, 2, 4)}
    lesson.fact("layers", [layers[pp] for pp in (1, 2, 4)])
    if any(layers[pp] != [list(lab.layers_of(i, pp)) for i in range(pp)] for pp in (1, 2, 4)):
        return
    watch_sends()
    run_pipeline(lesson, "whole", module.gpipe, lesson.world, 4)
    if lesson.world == 4:
        run_pipeline(lesson, "pairs", module.gpipe, 2, 4)  # groups 0 2 and 1 3


def judge_gpipe(group: Group, right: Callable[[str], None]) -> None:
    lab = finished()
    for pp, found in zip((1, 2, 4), group.facts("layers")[0], strict=True):
        if found != [list(lab.layers_of(i, pp)) for i in range(pp)]:
            raise Wrong(f"with {pp} stages the layers are {found}", HINTS["layers"])
    for name in ("whole", "pairs") if group.world == 4 else ("whole",):
        judge_schedule(group, name, right)
        for stage, events in enumerate(group.facts(f"{name} events")):
            if [event[0] for event in events] != ["F"] * 4 + ["B"] * 4:
                what = f"rank {stage} runs {' '.join(events)}"
                raise Wrong(what, HINTS["not_gpipe"])
            if [event for event in events if event[0] == "F"] != ["F0", "F1", "F2", "F3"]:
                raise Wrong(f"rank {stage} runs {' '.join(events)}", HINTS["each_once"])
        judge_numbers(group, name, right)


def judge_schedule(group: Group, name: str, right: Callable[[str], None]) -> None:
    """Every micro-batch once in each direction, nothing left over."""
    for rank, events in enumerate(group.facts(f"{name} events")):
        m = group.facts(f"{name} stage")[rank][2]
        expected = sorted(f"{letter}{k}" for letter in "FB" for k in range(m))
        if sorted(events or []) != expected:
            what = f"rank {rank} runs {' '.join(events or ['nothing'])}"
            raise Wrong(what, HINTS["each_once"])
    for rank, live in enumerate(group.facts(f"{name} live")):
        if live:
            what = f"{live} micro-batches are live at the end of rank {rank}"
            raise Wrong(what, HINTS["not_forgotten"])
    for rank, kept in enumerate(group.facts(f"{name} kept")):
        calls = [call.name for call in group.ranks[rank].calls]
        if "isend" in calls and "send" not in calls and kept == 0:
            what = f"rank {rank} starts sends and keeps none of them"
            raise Wrong(what, HINTS["not_kept"])


def judge_numbers(group: Group, name: str, right: Callable[[str], None]) -> None:
    """Loss and gradients."""
    gradients, stages = group.facts(f"{name} gradients"), group.facts(f"{name} stage")
    m = stages[0][2]
    if set(gradients) == {"times_m"}:
        what = f"with {m} micro-batches the gradients are {m} times those of one process"
        raise Wrong(what, HINTS["loss_not_divided"])
    wrong = [stage for (stage, *_), found in zip(stages, gradients, strict=True)
             if found != "right"]  # fmt: skip
    if wrong:
        what = f"the gradients of stage {wrong[0]} are not those of one process"
        last = stages[0][1] - 1
        if last not in wrong:
            raise Wrong(what, HINTS["sent_back"])
        raise Wrong(what, HINTS["other"])
    right(f"{stages[0][1]} stages, {m} micro-batches: the gradients of one process")
    for (stage, pp, _), loss in zip(stages, group.facts(f"{name} loss"), strict=True):
        if stage == pp - 1 and loss != "right":
            raise Wrong("self.loss is not the loss of one process", HINTS["loss_not_added"])


def probe_1f1b(lesson: Lesson) -> None:
    names = "layers_of", "Pipeline", "gpipe", "one_f_one_b"
    module, _ = keep_only(lesson, *names)
    watch_sends()
    for m in (8, 2):
        run_pipeline(lesson, f"m={m}", module.one_f_one_b, lesson.world, m)


def lead(events: Sequence[str]) -> int:
    """How many forwards come before the first backward."""
    letters = [event[0] for event in events]
    return letters.index("B") if "B" in letters else len(letters)


def judge_order(group: Group, name: str) -> None:
    """Raise `Wrong` if the stages did not run in the order of 1F1B, as far as they came."""
    stages, events = group.facts(f"{name} stage"), group.facts(f"{name} events")
    if None in stages or None in events:
        return
    leads = [lead(found) for found in events]
    began = ["B" in "".join(found) for found in events]
    expected = [min(pp - stage, m) for stage, pp, m in stages]
    m = stages[0][2]
    if any(
        "".join(event[0] for event in found) == "F" * m + "B" * m != "F" * want + "B" * m
        for found, want in zip(events, expected, strict=True)
    ) and all(count == m for count in leads):
        what = f"stage 0 runs {' '.join(events[0])}"
        raise Wrong(what, HINTS["not_1f1b"])
    if group.world > 1 and leads[-1] > expected[-1] and leads[0] < expected[0]:
        what = f"stage 0 runs {leads[0]} forwards before its first backward"
        raise Wrong(f"{what}, the last one {leads[-1]}", HINTS["warm_up_backwards"])
    for (stage, *_), count, want, sure in zip(stages, leads, expected, began, strict=True):
        what = f"with {m} micro-batches stage {stage} runs {count} forwards before its first"
        what = f"{what} backward, and {want} are due"
        if count > want:
            raise Wrong(what, HINTS["warm_up_long"])
        if sure and count < want:
            raise Wrong(what, HINTS["warm_up_short"])


def stuck_in_pipeline(group: Group) -> None:
    """Why stages wait for each other."""
    sending = [
        str(r)
        for r, rank in enumerate(group.ranks)
        if any(call.name == "send" and not call.returned for call in rank.calls)
    ]
    if sending:
        what = f"rank {', '.join(sending)} did not come out of send"
        raise Wrong(what, HINTS["blocking_send"])
    for m in (8, 2):
        judge_order(group, f"m={m}")
    waiting = [str(r) for r, rank in enumerate(group.ranks) if rank.end == "waiting"]
    raise Wrong(f"rank {', '.join(waiting)} did not end", HINTS["pipeline_stuck"])


def judge_1f1b(group: Group, right: Callable[[str], None]) -> None:
    for m in (8, 2):
        name = f"m={m}"
        judge_schedule(group, name, right)
        judge_order(group, name)
        for stage, events in enumerate(group.facts(f"{name} events")):
            pp = group.facts(f"{name} stage")[stage][1]
            for letter in "FB":
                order = [event for event in events if event[0] == letter]
                if order != [f"{letter}{k}" for k in range(m)]:
                    what = f"stage {stage} runs {' '.join(events)}"
                    raise Wrong(what, HINTS["backward_order"])
            warm_up = min(pp - 1 - stage, m)
            pairs = "F" * warm_up + "FB" * (m - warm_up) + "B" * warm_up
            if "".join(event[0] for event in events) != pairs:
                raise Wrong(f"stage {stage} runs {' '.join(events)}", HINTS["not_1f1b"])
        judge_numbers(group, name, right)


# --- step 8 -------------------------------------------------------------------------------

LAYOUTS = {1: (1, 1), 2: (1, 1), 4: (1, 2), 8: (2, 2)}  # world: (pp, tp), the rest is dp


def probe_composition(lesson: Lesson) -> None:
    names = "my_share", "average_gradients", "clip_gradients", "train"
    module, lab = keep_only(lesson, *names)
    grid = lab.Grid(*LAYOUTS[lesson.world])
    lesson.fact("place", [grid.stage, grid.replica, grid.shard])
    good = []

    rows = torch.arange(16).view(16, 1).expand(16, 3).clone()
    share = module.my_share(rows, grid)
    lesson.fact("share", torch.as_tensor(share)[:, 0].tolist())
    mine = rows.chunk(grid.dp)[grid.replica]
    good.append(len(share) == len(mine))

    stage = lab.Stage(lab.build_model(), grid)
    named = list(stage.named_parameters())

    def value(i: int, parameter: nn.Parameter, replica: int, shard: int) -> float:
        return i + 1 + 7.3 * replica + (100 * shard if is_cut(parameter) else 0)

    replicas, shards, seen = range(grid.dp), range(grid.tp), {}
    for i, (_, parameter) in enumerate(named):
        own = value(i, parameter, grid.replica, grid.shard)
        parameter.grad = torch.full_like(parameter, own)
    module.average_gradients(stage, grid)
    for i, (name, parameter) in enumerate(named):
        values = [value(i, parameter, r, grid.shard) for r in replicas]
        over_tp = [value(i, parameter, r, s) for r in replicas for s in shards]
        mean, full = sum(values) / grid.dp, torch.ones_like(parameter)
        candidates = {
            "own": value(i, parameter, grid.replica, grid.shard),
            "sum": sum(values),
            "divided by all": sum(values) / lesson.world,
            "over all": sum(over_tp) / len(over_tp),
            "over all, sum": sum(over_tp) / grid.dp,
        }
        seen[name] = (
            verdict(
                parameter.grad,
                right=mean * full,
                **{k: v * full for k, v in candidates.items()},
            ),
            is_cut(parameter),
        )
    lesson.fact("average", list(seen.values()))
    good.append({found for found, _ in seen.values()} == {"right"})

    for name, limit in (("low", 1.0), ("high", 1e6)):
        for i, (_, parameter) in enumerate(named):
            own = value(i, parameter, 0, grid.shard) / 100
            parameter.grad = torch.full_like(parameter, own)
        before = [parameter.grad.clone() for _, parameter in named]
        squares = [0.0, 0.0]  # whole, cut
        for _, parameter in named:
            squares[is_cut(parameter)] += parameter.grad.square().sum().item()
        returned = module.clip_gradients(stage, grid, limit)
        factors = {
            round((p.grad.flatten()[0] / old.flatten()[0]).item(), 12)
            for (_, p), old in zip(named, before, strict=True)
        }
        lesson.fact("squares", squares)
        lesson.fact(f"{name} norm", float(returned) if returned is not None else None)
        lesson.fact(f"{name} factors", [min(factors), max(factors)])
    norm = true_norm(lab, grid)
    good.append(returned is not None and math.isclose(float(returned), norm, rel_tol=1e-6))

    everybody: list[Any] = [None] * lesson.world
    dist.all_gather_object(everybody, all(good))
    if all(everybody):
        losses, norms, _ = module.train(grid, torch.device("cpu"))
        lesson.fact("train", [losses, norms, *lab.train_alone()])


def is_cut(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "is_cut", False))


def true_norm(lab: ModuleType, grid: Any) -> float:
    """The norm that clip_gradients has to find, by the finished lab."""
    stage = lab.Stage(lab.build_model(), grid)
    for i, parameter in enumerate(stage.parameters()):
        shift = 100 * grid.shard if is_cut(parameter) else 0
        parameter.grad = torch.full_like(parameter, (i + 1 + shift) / 100)
    return lab.clip_gradients(stage, grid, 1e9)


def judge_composition(group: Group, right: Callable[[str], None]) -> None:
    places = group.facts("place")
    judge_share(group, places)
    right("every replica has its share of the samples, the same on all of its ranks")
    judge_average(group)
    right("gradients are averaged over the replicas")
    judge_norm(group, places)
    right("the norm is that of the whole model's gradient")
    for name, limit in (("low", 1.0), ("high", 1e6)):
        for rank, (least, most) in enumerate(group.facts(f"{name} factors")):
            norm = group.facts(f"{name} norm")[rank]
            due = min(1.0, limit / (norm + 1e-6))
            if not all(math.isclose(found, due, rel_tol=1e-4) for found in (least, most)):
                what = f"norm {norm:.4g}, limit {limit:g}: rank {rank} scales by {least:.4g}"
                grows = name == "high" and most > 1
                raise Wrong(what, HINTS["clip_grows" if grows else "not_clipped"])
    for losses, norms, true_losses, true_norms in group.facts("train"):
        for found, true in ((losses, true_losses), (norms, true_norms)):
            if not all(
                math.isclose(a, b, rel_tol=1e-5) for a, b in zip(found, true, strict=True)
            ):
                what = f"in training the losses are {losses}, of one process {true_losses}"
                raise Wrong(what, HINTS["other"])
    right("three steps have the losses of one process")


def judge_share(group: Group, places: list[list[int]]) -> None:
    shares = group.facts("share")
    by_replica: dict[int, set[tuple[int, ...]]] = {}
    for (_, replica, _), share in zip(places, shares, strict=True):
        by_replica.setdefault(replica, set()).add(tuple(share))
    what = f"the ranks read {'; '.join(' '.join(map(str, share)) for share in shares)}"
    if any(len(found) > 1 for found in by_replica.values()):
        raise Wrong(what, HINTS["share_by_rank"])
    each = [next(iter(found)) for found in by_replica.values()]
    if len(each) > 1 and len(set(each)) == 1:
        raise Wrong(what, HINTS["share_same"])
    if sorted(row for share in each for row in share) != list(range(16)):
        raise Wrong(what, HINTS["share_lost"])
    if len({len(share) for share in each}) > 1:
        raise Wrong(what, HINTS["share_lost"])


def judge_average(group: Group) -> None:
    for rank, seen in enumerate(group.facts("average")):
        found = {name for name, _ in seen}
        if found == {"right"}:
            continue
        wrong = sorted(found - {"right"})
        cut_right = all(name == "right" for name, cut in seen if cut)
        what = f"of {len(seen)} gradients on rank {rank}"
        what = f"{what} {sum(name != 'right' for name, _ in seen)} are wrong"
        what = f"{what} ({', '.join(wrong)})"
        if "own" in wrong and set(wrong) == {"own"}:
            raise Wrong(what, HINTS["not_averaged"])
        if cut_right:
            raise Wrong(what, HINTS["whole_reduced"])
        if set(wrong) <= {"sum", "divided by all"}:
            raise Wrong(what, HINTS["average_divisor"])
        raise Wrong(what, HINTS["averaged_over_all"])


def judge_norm(group: Group, places: list[list[int]]) -> None:
    """Which ranks' squares must have been added up to give what was returned?"""
    squares = group.facts("squares")

    def total(
        own: list[int], axes: Sequence[int], copies: bool = False, whole: bool = True
    ) -> float:
        """The norm over the ranks that differ from `own` along these axes alone."""
        result = 0.0
        for place, (whole_part, cut_part) in zip(places, squares, strict=True):
            if all(place[axis] == own[axis] for axis in range(3) if axis not in axes):
                counts = copies or place[2] == (0 if 2 in axes else own[2])
                result += cut_part + (whole_part if counts and whole else 0.0)
        return math.sqrt(result)

    for rank, own in enumerate(places):
        found = group.facts("low norm")[rank]
        if found is None:
            raise Wrong(f"clip_gradients returns nothing on rank {rank}", HINTS["norm_local"])
        true = total(own, (0, 2))
        if math.isclose(found, true, rel_tol=1e-6):
            continue
        what = f"rank {rank} finds the norm {found:.4f}, that of the whole model is {true:.4f}"
        candidates = [
            (total(own, ()), "norm_local"),
            (total(own, (), whole=own[2] == 0), "norm_local"),
            (total(own, (0, 2), copies=True), "norm_copies"),
            (total(own, (0, 2), whole=False), "norm_missed"),
            (total(own, (0, 1, 2)), "norm_replicas"),
            (total(own, (0, 1, 2), copies=True), "norm_replicas"),
            (total(own, (2,)), "norm_one_axis"),
            (total(own, (0,)), "norm_one_axis"),
            (total(own, (0,), whole=own[2] == 0), "norm_one_axis"),
            (true**2, "norm_of_norms"),
        ]
        for candidate, hint in candidates:
            if math.isclose(found, candidate, rel_tol=1e-6):
                raise Wrong(what, HINTS[hint])
        raise Wrong(what, HINTS["norm_of_norms"])


PIPELINE_CRASHES = (
    ("NoneType", HINTS["leaf"]),
    ("implicitly created only for scalar", HINTS["start_gradient"]),
    ("does not require grad", HINTS["detached"]),
    ("not part of|not in group|Invalid rank|invalid rank", HINTS["group_rank"]),
    (r"with \d+ micro-batches", HINTS["few_micro_batches"]),
)

STEPS = [
    Step(
        1,
        "three kinds of groups",
        "the groups of every box are right, and all ranks make them together",
        probe_groups,
        judge_groups,
        uses=("lines", "join"),
        worlds=(4, 8, 1),
    ),
    Step(
        2,
        "two conjugate operators",
        "f reduces in backward alone, g in forward alone, and both in the tp group",
        probe_operators,
        judge_operators,
        uses=("CopyToShards", "SumOverShards", "copy_to_shards", "sum_over_shards"),
        worlds=(4, 2, 1),
        crashes=(("incorrect number of gradients", HINTS["gradient_count"]),),
    ),
    Step(
        3,
        "a column and a row make an MLP",
        "both layers and the MLP have the outputs and gradients of the whole",
        probe_linear,
        judge_linear,
        uses=("ColumnLinear", "RowLinear", "ParallelMLP"),
        worlds=(2, 4, 1),
        crashes=(("no attribute '(weight|bias)'", HINTS["no_pieces"]),),
    ),
    Step(
        4,
        "heads over ranks, and a whole block",
        "attention and a block have the outputs and gradients of the whole",
        probe_attention,
        judge_attention,
        uses=("rows_by_shard", "ParallelAttention", "ParallelBlock"),
        worlds=(2, 4, 1),
    ),
    Step(
        5,
        "the loss without the logits",
        "loss and gradient are those of the whole vocabulary, and nothing overflows",
        probe_loss,
        judge_loss,
        uses=("vocabulary_parallel_loss",),
        worlds=(2, 4, 1),
    ),
    Step(
        6,
        "a pipeline",
        "GPipe has the loss and gradients of one process, in one pipeline and in two at once",
        probe_gpipe,
        judge_gpipe,
        uses=("layers_of", "Pipeline", "gpipe"),
        worlds=(2, 4, 1),
        symmetric=False,
        crashes=PIPELINE_CRASHES,
        order_hint=HINTS["pipeline_stuck"],
        stuck=stuck_in_pipeline,
    ),
    Step(
        7,
        "one forward, one backward",
        "1F1B has the loss and gradients of one process, with p - i micro-batches live",
        probe_1f1b,
        judge_1f1b,
        uses=("layers_of", "Pipeline", "one_f_one_b"),
        worlds=(2, 4, 1),
        needs=(6,),
        symmetric=False,
        crashes=PIPELINE_CRASHES,
        order_hint=HINTS["pipeline_stuck"],
        stuck=stuck_in_pipeline,
    ),
    Step(
        8,
        "all three",
        "data, gradients and norm go along their own axes, and three steps of training have "
        "the losses of one process",
        probe_composition,
        judge_composition,
        uses=("my_share", "average_gradients", "clip_gradients", "train"),
        worlds=(4, 8, 2, 1),
        symmetric=False,
    ),
]
