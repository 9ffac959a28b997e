"""Grade lab 10: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. If a number is wrong, it is compared with the numbers that common mistakes give. If it
equals one of these, this mistake determines the hint.
"""

import collections
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it; import it here once for all processes
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) imports it
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn import functional as F

from graders.dsl import (
    Lab,
    Wrong,
    allclose,
    describe_error,
    gathered,
    isclose,
    matching_hint,
    matching_name,
    requested_groups,
    require,
    show,
)
from graders.protocol import Group, Judge
from graders.rank import Lesson

LAB = Lab()
DTYPE, TIGHT = torch.float64, (1e-9, 1e-11)
NOT_FINITE = "infinite or NaN"


# --- comparing tensors ---------------------------------------------------------------------


def expect(
    what: str, found: Any, right: torch.Tensor, hint: str = "other",
    known: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Raise `Wrong` unless a tensor of this rank is the right one.

    `known` maps the description of a common mistake to the tensor that it gives, or to a pair
    (tensor, hint) if the mistake has a hint of its own.
    """
    if allclose(found, right, *TIGHT):
        return
    known = {n: each if isinstance(each, tuple) else (each, hint)
             for n, each in (known or {}).items()}  # fmt: skip
    name = next((n for n, (each, _) in known.items() if allclose(found, each, *TIGHT)), None)
    if name is None and allclose(found, right, 1e-4, 1e-6):
        name, hint = "almost right, but not exact in float64", "precision"
    name = name or kind_of(found, right.shape)
    if found is None and not what.startswith(("the gradient", "backward")):
        hint = "returned"
    what = f"{what} on rank {dist.get_rank()} is not right" + f": it is {name}" * bool(name)
    raise Wrong(what, known.get(name, (None, hint))[1])


def kind_of(found: Any, shape: torch.Size) -> str:
    """Describe a value that is not a finite tensor of this shape, or return ""."""
    if not isinstance(found, torch.Tensor):
        return "None" if found is None else f"a value of the type {type(found).__name__}"
    if found.shape != shape:
        sizes = ["×".join(map(str, each)) or "one number" for each in (found.shape, shape)]
        return "of the shape {}, and it should be {}".format(*sizes)
    return "" if found.isfinite().all() else NOT_FINITE


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


# --- step 1 -------------------------------------------------------------------------------

KINDS = {"tp": "tp_neighbours", "pp": "axes_swapped", "dp": "axes_swapped"}
BOXES = ((8, 2, 2), (8, 1, 4), (12, 3, 2), (4, 4, 1), (6, 1, 2))  # (world, pp, tp)


@LAB.step(
    1, "three kinds of groups",
    "the groups of every box are right, and all ranks make them together",
    "lines join", own="lines join Grid", world_sizes=(4, 8, 1),
)  # fmt: skip
def groups(submission, reference, lesson):
    for box in BOXES:
        found = submission.lines(*box)
        good = isinstance(found, dict) and set(found) == set(KINDS)
        require(good, f"lines() returns a {type(found).__name__}", "lines_kind")
        for kind in KINDS:
            is_list = all(isinstance(ranks, Sequence) for ranks in found[kind])
            kinds = (
                {type(r).__name__ for ranks in found[kind] for r in ranks} if is_list else ""
            )
            what = f"lines() returns {show(found[kind])} for {kind}"
            require(is_list and kinds == {"int"}, what, "lines_kind")
        check_lines(box, found, reference.lines(*box))
    yield "lines() finds the groups of every box"

    n, rank = lesson.world, lesson.rank
    groups = torch.arange(n).view(max(n // 2, 1), -1).T.flip(0).tolist()
    requested = gathered(requested_groups(submission, lambda: submission.join(groups)))
    for other, calls in enumerate(requested):
        what = f"rank 0 makes the groups {requested[0]}, and rank {other} makes {calls}"
        require(calls == requested[0], what, "new_group_by_all")
    again = requested_groups(submission, lambda: submission.join(groups))
    what = f"the second join() of the groups {requested[rank]} makes the groups {again}"
    require(again == requested[rank], what, "join_again")
    joined = submission.join(groups)
    is_group = isinstance(joined, dist.ProcessGroup)
    joined = sorted(dist.get_process_group_ranks(joined)) if is_group else show(joined)
    for other, found in enumerate(gathered(joined)):
        what = f"rank {other} joins the group {found}" if isinstance(found, list) else (
            f"join() returns {found} on rank {other}"
        )  # fmt: skip
        require(found == sorted(next(g for g in groups if other in g)), what, "wrong_group")
    pp = tp = min(n, 2)
    grid, dp = submission.Grid(pp, tp), n // (pp * tp)
    has_group = isinstance(grid.dp_group, dist.ProcessGroup)
    what = f"join() returns {show(grid.dp_group)} on rank {rank} for a group of one rank"
    require(dp > 1 or has_group, what, "wrong_group")
    place = [grid.stage, grid.replica, grid.shard]
    what = f"the grid of rank {rank} has stage, replica, shard {place}"
    require(place == [rank // (dp * tp), rank // tp % dp, rank % tp], what, "axes_swapped")


def check_lines(box: tuple[int, int, int], found: dict, true: dict) -> None:
    """Raise `Wrong` unless the groups of one box are right."""
    world, pp, tp = box
    found, true = (
        {kind: sorted(sorted(map(int, line)) for line in each[kind]) for kind in KINDS}
        for each in (found, true)
    )
    what = f"of {world} ranks with pp {pp} and tp {tp}, the {{}} groups are {{}}".format
    for kind in ("pp", "dp", "tp"):
        has_all = sorted(itertools.chain(*found[kind])) == list(range(world))
        same_sizes = set(map(len, found[kind])) == set(map(len, true[kind]))
        require(has_all and same_sizes, what(kind, found[kind]), "lines_partition")
    for kind, hint in KINDS.items():
        require(found[kind] == true[kind], what(kind, found[kind]), hint)


# --- step 2 -------------------------------------------------------------------------------


@LAB.step(
    2, "two conjugate operators",
    "f reduces in backward alone, g in forward alone, and both in the tp group",
    "CopyToShards SumOverShards copy_to_shards sum_over_shards", world_sizes=(4, 2, 1),
    crashes={
        "incorrect number of gradients|gradient different than None": "gradient_count",
        "Backward' object has no attribute|save_for_backward can only": "not_stored",
    },
)  # fmt: skip
def operators(submission, reference, lesson):
    grid = reference.Grid(tp=min(lesson.world, 2))  # with 4 ranks: two groups of two
    terms = [random(3, 4, seed=rank) for rank in range(lesson.world)]
    mine, first = terms[lesson.rank], lesson.rank - grid.shard
    total, sum_of_all = sum(terms[first : first + grid.tp]), sum(terms)
    x = random(3, 4, seed=100)
    in_group, in_world = "the sum over the tp group", "the sum over all ranks"
    of_x = {in_group: grid.tp * x, in_world: (lesson.world * x, "not_tp_group")}
    of_terms = {
        "what this rank alone has": mine,
        in_group: total,
        in_world: (sum_of_all, "not_tp_group"),
    }
    for name, apply, given, known, true, true_gradient in (
        ("f", submission.copy_to_shards, x, of_x, x, total),
        ("g", submission.sum_over_shards, mine, of_terms, total, mine),
    ):
        argument, gradient = given.clone().requires_grad_(), mine.clone()
        y = apply(argument, grid)
        expect(f"forward of {name}", y, true, f"{name}_forward", known)
        yield f"forward of {name}"
        apply(given.clone(), SimpleNamespace(tp_group=dist.group.WORLD))  # a different group
        is_unchanged = allclose(argument, given, *TIGHT)
        y.backward(gradient)
        found, hint = argument.grad, f"{name}_backward"
        expect(f"backward of {name}", found, true_gradient, hint, of_terms)
        yield f"backward of {name}"
        is_unchanged = is_unchanged and allclose(gradient, mine, *TIGHT)
        require(is_unchanged, f"{name} overwrites its argument", "in_place")


# --- step 3 -------------------------------------------------------------------------------


def in_two_groups(
    reference: ModuleType, lesson: Lesson, what: str, run: Callable[[Any], torch.Tensor],
    true: torch.Tensor,
) -> None:  # fmt: skip
    """With four ranks, compare a result in two tp groups of two ranks with the true one."""
    if lesson.world != 4:
        return
    grid = reference.Grid(tp=2)
    before = len(lesson.calls)
    try:
        found = run(grid)  # outside of a phase, so that the score does not count it
    except (IndexError, RuntimeError) as error:
        what = f"with two tp groups of two ranks, {describe_error(error, lesson.module)[0]}"
        raise Wrong(what, "several_groups") from error
    expect(f"with two tp groups of two ranks, the {what}", found, true, "several_groups")
    calls = lesson.calls[before:]
    what = f"with two tp groups of two ranks, the {what} uses the group of all ranks"
    require(all(call.members for call in calls), what, "group_of_all")


@LAB.step(
    3, "a column and a row make an MLP",
    "both layers and the MLP have the outputs and gradients of the whole",
    "ColumnLinear RowLinear ParallelMLP", world_sizes=(2, 4, 1),
    crashes={"no attribute '(weight|bias)'": "no_pieces"},
)  # fmt: skip
def linear(submission, reference, lesson):
    grid, full = reference.Grid(tp=lesson.world), reference.build_model().blocks[0].mlp
    t = grid.tp

    def whole(value: torch.Tensor) -> torch.Tensor:
        return value

    def mine(value: torch.Tensor, along: int = -1) -> torch.Tensor:
        return value.chunk(t, along)[grid.shard]

    column, row = submission.ColumnLinear(full.up, grid), submission.RowLinear(full.down, grid)
    layers = (  # name, layer, the layer of one process, dimension of the cut, input, output
        ("Column", column, full.up, 0, whole, mine),
        ("Row", row, full.down, 1, mine, whole),
    )
    for name, layer, true, dim, _, out in layers:
        known = {
            "cut along the other dimension": mine(true.weight, 1 - dim),
            "the whole weight": true.weight,
            "the piece of the first rank": (true.weight.chunk(t, dim)[0], "first_piece"),
        }
        what, hint = f"the weight of {name}Linear", f"{name.lower()}_dim"
        expect(what, layer.weight, mine(true.weight, dim), hint, known)
        known = {"the whole bias": true.bias, "a piece of the bias": mine(true.bias)}
        what, hint = f"the bias of {name}Linear", f"{name.lower()}_bias"
        expect(what, layer.bias, out(true.bias), hint, known)
        what = f"{name}Linear uses the bias of the whole model itself"
        require(layer.bias is not true.bias, what, "shared_bias")
        for kind in ("weight", "bias"):
            found = getattr(layer, kind)
            trained = isinstance(found, nn.Parameter) and found.requires_grad
            what = f"the {kind} of {name}Linear is not a parameter that requires a gradient"
            require(trained, what, "not_parameter")
            addresses = [
                getattr(each, kind).untyped_storage().data_ptr() for each in (layer, true)
            ]
            what = f"the {kind} of {name}Linear is in the memory of the whole model's {kind}"
            require(addresses[0] != addresses[1], what, "shared_memory")
        marks = [getattr(each, "is_cut", False) for each in (layer.weight, layer.bias)]
        what = f"is_cut of the weight and of the bias of {name}Linear on rank {lesson.rank} is"
        what += f" {marks[0]} and {marks[1]}; it should be True and {dim == 0}"
        require(marks == [True, dim == 0], what, "not_marked")
    yield "both layers have the right pieces"

    for name, layer, true, dim, into, out in layers:
        x = random(2, reference.SEQUENCE, true.in_features)
        own_x, whole_x = (each.clone().requires_grad_() for each in (into(x), x))
        y, output = layer(own_x), true(whole_x)
        part, bias = F.linear(into(x), layer.weight), true.bias.detach()
        known = {
            "the sum over the shards": (sum(output.chunk(t, -1)), "column_summed"),
            "the whole output": (output, "column_summed"),
            "without the bias": (part, "column_no_bias"),
        }
        if name == "Row":
            known = {
                "the part of this rank": (part, "row_not_summed"),
                "the part of this rank, with the bias": (part + bias, "row_not_summed"),
                "without the bias": (output - bias, "row_bias"),
                "the sum with the bias t times": (output + (t - 1) * bias, "bias_each"),
            }
        expect(f"the output of {name}Linear", y, out(output), known=known)
        upstream = random(*output.shape, seed=4)
        y.backward(out(upstream))
        output.backward(upstream)
        own, share = out(upstream) @ layer.weight.detach(), out(true.bias.grad)
        what = f"the gradient of RowLinear's bias on rank {lesson.rank} is None"
        require(name == "Column" or layer.bias.grad is not None, what, "bias_one")
        of_bias = {
            "the sum over the shards": (sum(true.bias.grad.chunk(t)), "column_input"),
        } if name == "Column" else {
            "divided by t": (share / t, "bias_each"),
            "zero": (torch.zeros_like(share), "bias_one"),
        }  # fmt: skip
        of_input = {
            "what this rank alone has": (own, "column_input"),
        } if name == "Column" else {
            "the sum over the shards": (sum(whole_x.grad.chunk(t, -1)), "row_input"),
        }  # fmt: skip
        for what, found, right, known in (
            ("bias", layer.bias.grad, share, of_bias),
            ("input", own_x.grad, into(whole_x.grad), of_input),
            ("weight", layer.weight.grad, mine(true.weight.grad, dim), {}),
        ):
            what = f"the gradient of {name}Linear's {what}"
            expect(what, found, right, "shard_gradient", known)
        if name == "Column":
            yield "ColumnLinear has the outputs and gradients of the whole"
    x = random(2, reference.SEQUENCE, reference.HIDDEN)
    with lesson.phase("forward"):
        expect("the output of the MLP", submission.ParallelMLP(full, grid)(x), full(x))
    in_two_groups(
        reference, lesson, "MLP", lambda pair: submission.ParallelMLP(full, pair)(x), full(x)
    )


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "heads over ranks, and a whole block",
    "attention and a block have the outputs and gradients of the whole",
    "rows_by_shard ParallelAttention ParallelBlock", world_sizes=(2, 4, 1),
)  # fmt: skip
def attention(submission, reference, lesson):
    order = torch.arange(3 * reference.HIDDEN)
    by_head = order.view(3, reference.HEADS, -1).transpose(0, 1).flatten()
    known = {"the old order": order, "an order by heads": (by_head, "per_head")}
    for tp in (2, 4, 1):
        rows = submission.rows_by_shard(tp)
        require(rows is not None, f"rows_by_shard({tp}) returns None", "not_an_order")
        rows = torch.as_tensor(rows)
        what = f"rows_by_shard({tp}) returns a tensor of {rows.ndim} dimensions"
        require(rows.ndim == 1, what, "not_an_order")
        what = f"rows_by_shard({tp}) returns {len(rows)} numbers, {len(set(rows.tolist()))} of"
        what += f" which are different; it should return each of {len(order)} row numbers once"
        require(sorted(rows.tolist()) == order.tolist(), what, "not_an_order")
        expect(f"rows_by_shard({tp})", rows, reference.rows_by_shard(tp), "heads_mixed", known)
    yield "each piece of the fused matrix has q, k and v of its own heads"

    grid, full = reference.Grid(tp=lesson.world), reference.build_model().blocks[0]
    x = random(2, reference.SEQUENCE, reference.HIDDEN)
    attention = submission.ParallelAttention(full.attention, grid)
    true_attention = reference.ParallelAttention(full.attention, grid)
    real = F.scaled_dot_product_attention
    known = {}
    for name, hint, place, attribute, mistake in (
        (
            "attention with all HEADS",
            "local_heads",
            reference,
            "HEADS",
            reference.HEADS * grid.tp,
        ),
        (
            "attention whose heads have the width HEADS / tp",
            "heads_swapped",
            reference,
            "HEADS",
            reference.HIDDEN // reference.HEADS * grid.tp,
        ),
        *(
            (
                f"attention whose scale is 1 / √{width}",
                "scale",
                F,
                "scaled_dot_product_attention",
                functools.partial(real, scale=width**-0.5),
            )
            for width in {1, reference.SEQUENCE, reference.HIDDEN // grid.tp, reference.HIDDEN}
            if width * reference.HEADS != reference.HIDDEN
        ),
        (
            "attention that sees later tokens",
            "not_causal",
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, **_: real(q, k, v),
        ),
        (
            "attention whose heads are not transposed back",
            "heads_apart",
            F,
            "scaled_dot_product_attention",
            lambda q, k, v, **_: (
                real(q, k, v, is_causal=True)
                .reshape(len(q), q.size(2), q.size(1), -1)
                .transpose(1, 2)
            ),
        ),
    ):
        with mock.patch.object(place, attribute, mistake):
            known[name] = true_attention(x), hint
    own_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, true = attention(own_x), full.attention(whole_x)
    known["the sum of t equal outputs"] = grid.tp * true, "summed_again"
    expect("the output of attention", y, true, known=known)
    in_two_groups(
        reference,
        lesson,
        "output of attention",
        lambda pair: submission.ParallelAttention(full.attention, pair)(x),
        true,
    )
    yield "attention has the output of the whole"
    if y.requires_grad:
        y.square().sum().backward()
    (true,) = torch.autograd.grad(true.square().sum(), whole_x)
    known = {"t times the right one": (grid.tp * true, "copied_again")}
    what = "the gradient of the input of attention"
    expect(what, own_x.grad, true, "shard_gradient", known)

    block = submission.ParallelBlock(full, grid)
    own_x, whole_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    with lesson.phase("forward and backward"):
        y, true = block(own_x), full(whole_x)
        expect("the output of the block", y, true)
        y.square().sum().backward()
    true.square().sum().backward()
    expect("the gradient of the input", own_x.grad, whole_x.grad, "shard_gradient")
    expected = reference.expected_gradients(
        full, lambda whole: reference.ParallelBlock(whole, grid)
    )
    expected = dict(expected.named_parameters())
    wrong = [
        name
        for name, parameter in block.named_parameters()
        if name not in expected or not allclose(parameter.grad, expected[name], *TIGHT)
    ]
    what = f"on rank {lesson.rank} these gradients are not right: {', '.join(wrong)}"
    require(not wrong, what, "shard_gradient")


# --- step 5 -------------------------------------------------------------------------------


def mistaken_losses(
    z: torch.Tensor, targets: torch.Tensor, shard: int, tp: int
) -> dict[str, tuple[torch.Tensor, str]]:
    """Return the loss and the hint of each common mistake on a shard, by its description."""
    width = z.size(-1) // tp
    shifted = (z - z.amax(-1, keepdim=True)).chunk(tp, -1)
    own_shifted = [part - part.amax(-1, keepdim=True) for part in shifted]

    def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(part.exp().sum(-1) for part in parts).log()

    def target(
        parts: Sequence[torch.Tensor], offset: int = width, is_masked: bool = True,
        more: int = 0, least: int = 0, wrap: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return what each rank contributes to the target logits.

        The arguments are mistakes: a wrong `offset` between the parts of two ranks, no mask,
        `more` columns behind a part, columns only from `least` on, and indices that `wrap`.
        """
        found = []
        for rank, part in enumerate(parts):
            place = targets - rank * offset
            column = place % width if wrap else place.clamp(0, width - 1)
            logit = part.gather(-1, column.unsqueeze(-1)).squeeze(-1)
            mine = (place >= least) & (place < width + more)
            found.append(logit * mine if is_masked else logit)
        return found

    true, found = total(shifted), target(shifted)
    losses = {
        "the loss with a maximum for each rank": (
            total(own_shifted) - sum(target(own_shifted)),
            "own_maximum",
        ),
        "the loss with the exponentials of this rank alone": (
            total([shifted[shard]]) - sum(found),
            "total_not_summed",
        ),
        "the loss with some targets from two ranks": (
            true - sum(target(shifted, more=1)),
            "target_not_masked",
        ),
        "the loss with a target from every rank": (
            true - sum(target(shifted, is_masked=False)),
            "target_not_masked",
        ),
        "the loss with a number from every rank": (
            true - sum(target(shifted, is_masked=False, wrap=True)),
            "target_not_masked",
        ),
        "the loss with the sum of the ranks' logarithms": (
            sum(part.logsumexp(-1) for part in shifted) - sum(found),
            "total_of_logs",
        ),
        "the loss with targets that are looked up in the wrong columns": (
            true - sum(target(shifted, offset=0)),
            "target_offset",
        ),
        "the loss with the target of this rank alone": (
            true - found[shard],
            "target_not_summed",
        ),
        "the loss with the last column for each target that is to the right of a part": (
            true - sum(target(shifted, more=1 << 30)),
            "target_not_masked",
        ),
        "the loss without the targets in the first column of a part": (
            true - sum(target(shifted, least=1)),
            "target_not_masked",
        ),
        "the loss with a target from which no maximum is subtracted": (
            true - sum(target(z.chunk(tp, -1))),
            "target_not_shifted",
        ),
        "minus infinity": (torch.tensor(-math.inf), "underflow"),
        "the sum over the positions": (targets.numel() * (true - sum(found)), "loss_not_mean"),
        NOT_FINITE: (torch.tensor(math.inf), "overflow"),
    }
    return {name: (loss.mean(), hint) for name, (loss, hint) in losses.items()}


@LAB.step(
    5, "the loss without gathering the logits",
    "loss and gradient are those of the whole vocabulary, and nothing overflows",
    "vocabulary_parallel_loss", world_sizes=(2, 4, 1),
    crashes={"out of bounds": "target_clamp"},
)  # fmt: skip
def loss(submission, reference, lesson):
    grid = reference.Grid(tp=lesson.world)
    z = 3 * random(2, 5, reference.VOCABULARY) + 900  # without the maximum, exp overflows
    z[0, 0] -= 2000  # with a maximum over several positions, exp is 0 here
    generator = torch.Generator().manual_seed(8)
    targets = torch.randint(reference.VOCABULARY, (2, 5), generator=generator)
    whole, mine = z.clone().requires_grad_(), reference.cut(z, -1, grid)
    true = reference.mean_loss(whole, targets)
    true.backward()
    with lesson.phase("loss"):
        loss = submission.vocabulary_parallel_loss(mine, targets, grid)
    known = mistaken_losses(z, targets, grid.shard, grid.tp)
    expect("the loss", loss, true, known=known)
    sent = sum(call.numel for call in lesson.calls if call.phase == "loss")
    what = f"for {targets.numel()} positions the loss sends {sent} numbers"
    require(sent <= 6 * targets.numel(), what, "logits_gathered")
    yield "the loss is that of the whole vocabulary"
    if loss.requires_grad:
        loss.backward()
    true = reference.cut(whole.grad, -1, grid)
    expect("the gradient of the logits", mine.grad, true, "loss_gradient")
    in_two_groups(
        reference,
        lesson,
        "loss",
        lambda pair: submission.vocabulary_parallel_loss(
            reference.cut(z, -1, pair), targets, pair
        ),
        reference.mean_loss(z, targets),
    )


# --- steps 6 and 7 ------------------------------------------------------------------------

MESSAGES: list["Message"] = []
SIGNATURES = {
    name: inspect.signature(getattr(distributed_c10d, name))
    for name in ("isend", "irecv", "send", "recv")
}


class Message:
    """The Work of a message that is being sent or received. It exists as long as the process.

    If the learner's code deletes the Work of a send, a message would otherwise arrive only in
    some runs.
    """

    def __init__(self, lesson: Lesson, name: str, work: dist.Work, arguments: tuple):
        self._lesson, self._work, self._arguments = lesson, work, arguments
        self.name, self.waited = name, False  # waited: wait() or is_completed() was called
        MESSAGES.append(self)

    def wait(self, *args: Any) -> bool:
        self.waited = True
        outside = self._lesson.current_phase != "finish"
        self._lesson.fact("in send", self.name == "isend" and outside)
        done = self._work.wait(*args)
        self._lesson.fact("in send", False)
        return done

    def is_completed(self) -> bool:
        self.waited = True
        return self._work.is_completed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def watch_messages(lesson: Lesson, grid: Any, numel: int) -> None:
    """Record the messages of this rank, and check them. Each must have `numel` float64 numbers.

    A tensor that is not contiguous is sent as a contiguous copy. The fact `in send` is True
    while the rank waits for a message that it has sent.
    """
    MESSAGES.clear()

    def check_tensor(tensor: Any, what: str) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            shown = f"{tensor.numel():,} numbers of {str(tensor.dtype).removeprefix('torch.')}"
            what = f"rank {lesson.rank} {what} {shown}; it should be {numel:,} of float64"
            require(tensor.dtype == DTYPE and tensor.numel() == numel, what, "message")

    def check_peer(kind: str, arguments: dict[str, Any]) -> None:
        """Raise `Wrong` if a message goes to its own rank, or if both kinds share a group."""
        group = arguments.get("group") or dist.group.WORLD
        group_peer = arguments.get("group_dst", arguments.get("group_src"))
        peer = arguments.get("dst", arguments.get("src")) if group_peer is None else None
        what = f"rank {lesson.rank}, the only stage, {kind.split()[0]} a message"
        require(grid.pp > 1 or group_peer in (None, 0), what, "first_and_last")
        if group_peer is not None:
            peer = dist.get_global_rank(group, group_peer)
        if peer is None:
            return
        what = f"rank {lesson.rank} {kind.split()[0]}"
        what += " a message to itself" if kind == "sends" else " a message from itself"
        require(peer != lesson.rank, what, "to_itself")
        stages = dist.get_process_group_ranks(grid.pp_group)
        if peer in stages:
            is_later = stages.index(peer) > grid.stage
            content = "activations" if is_later == (kind == "sends") else "gradients"
            contents[id(group)].add(content)
            what = f"rank {lesson.rank} uses one group for activations and for gradients"
            require(len(contents[id(group)]) == 1, what, "one_group")

    contents: dict[int, set[str]] = collections.defaultdict(set)

    def watched(name: str, real: Callable) -> Callable:
        real = getattr(real, "unpatched", real)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = SIGNATURES[name].bind_partial(*args, **kwargs)
            arguments, given = bound.arguments, bound.arguments.get("tensor")
            kind = "sends" if "send" in name else "receives into a tensor of"
            check_tensor(given, kind)
            check_peer(kind, arguments)
            if "send" in name and isinstance(given, torch.Tensor):
                arguments["tensor"] = given.contiguous()
            work = real(*bound.args, **bound.kwargs)
            if name in ("send", "recv"):
                return work
            return Message(lesson, name, work, (given, args, kwargs))

        call.__name__ = call.__qualname__ = name
        call.unpatched = real
        return call

    for name in SIGNATURES:
        setattr(dist, name, watched(name, getattr(dist, name)))
    # batch_isend_irecv accepts only these functions; send calls isend and waits
    distributed_c10d.isend, distributed_c10d.irecv = dist.isend, dist.irecv


@dataclass
class Run:
    """The events and results of one rank in one step of a pipeline."""

    rank: int
    stage: int
    pp: int
    m: int
    events: list[str] = field(default_factory=list)  # F0 F1 B0 ..., as they begin
    live: int = 0  # micro-batches in `live` at the end
    gradients: str = ""  # "right", or the name of a mistake; "times_m": too large by `factor`
    factor: float = 1.0
    loss: bool = False  # the loss of the last stage is right
    graph: bool = False  # the loss has a graph
    stale: list[int] = field(default_factory=list)  # micro-batches still live after backward
    forgotten: int = 0  # sends without a wait
    unread: int = 0  # receives without a wait

    def __str__(self) -> str:
        return " ".join(self.events or ["nothing"])

    @property
    def letters(self) -> str:
        return "".join(event[0] for event in self.events)

    @property
    def lead(self) -> int:
        """The number of forward passes before the first backward pass."""
        return len(self.letters.partition("B")[0])

    @property
    def due(self) -> int:
        """The right value of `lead` in 1F1B."""
        return min(self.pp - self.stage, self.m)


def run_pipeline(
    submission: ModuleType,
    reference: ModuleType,
    lesson: Lesson,
    schedule: Callable,
    pp: int,
    m: int,
) -> list[Run]:
    """Run one step of a pipeline, and return the `Run` of each rank.

    Raise `Wrong` unless each micro-batch has run once forward and once backward. Each call is
    reported when it begins, so that the grader can explain a pipeline that does not end.
    """
    lesson.fact("finished", False)
    lesson.fact("scheduled", 0)
    grid, full = reference.Grid(pp, lesson.world // pp), reference.build_model()
    tokens = reference.make_batches()[0]
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    stage = reference.Stage(full, grid)
    pipe = submission.Pipeline(stage, inputs.chunk(m), targets.chunk(m))
    watch_messages(lesson, grid, inputs.numel() // m * reference.HIDDEN)
    run = Run(lesson.rank, grid.stage, pp, m)

    def recorded(letter: str, real: Callable[[int], None]) -> Callable[[int], None]:
        def call(k: int) -> None:
            if not 0 <= k < m:
                what = "forward" if letter == "F" else "backward"
                raise IndexError(f"{what}({k}) with {m} micro-batches")
            run.events.append(f"{letter}{k}")
            lesson.fact(f"m={m}", vars(run))
            if m == 8:
                lesson.fact("schedule", run.events)
            real(k)
            if letter == "F" and grid.last and isinstance(pipe.live.get(k), tuple):
                shape = getattr(pipe.live[k][-1], "shape", ())
                what = f"the output in self.live[{k}] of the last stage has the shape"
                require(len(shape) == 0, f"{what} {[*shape]}", "live_pair")
            received = [x for x, *_ in pipe.live.values() if isinstance(x, torch.Tensor)]
            if letter == "F" and not grid.first:
                what = (
                    f"rank {lesson.rank} keeps {len(received)} received activations in the same"
                )
                what += " memory"
                addresses = {each.data_ptr() for each in received}
                require(len(addresses) == len(received), what, "one_buffer")
            if letter == "B" and k in pipe.live:
                run.stale.append(k)

        return call

    send = pipe.send

    def send_strided(tensor: Any, to: int) -> None:
        """Send a tensor that is not contiguous, because other models can send such tensors."""
        is_tensor = isinstance(tensor, torch.Tensor) and tensor.ndim > 1
        send(tensor.mT.contiguous().mT if is_tensor else tensor, to)

    pipe.send = send_strided
    pipe.forward, pipe.backward = recorded("F", pipe.forward), recorded("B", pipe.backward)
    schedule(pipe)
    lesson.fact("scheduled", m)
    are_pairs = all(len(pair) == 2 for pair in pipe.sends if isinstance(pair, (tuple, list)))
    have_tensors = are_pairs and all(isinstance(each, torch.Tensor) for *_, each in pipe.sends)
    what = f"rank {lesson.rank} has an entry in self.sends without the tensor that it sent"
    require(have_tensors, what, "send_pairs")
    for work, stored in pipe.sends:
        sent = work._arguments[0] if isinstance(work, Message) else stored
        what = f"rank {lesson.rank} stores a different tensor in self.sends than it sent"
        require(sent.data_ptr() == stored.data_ptr(), what, "kept_original")
    with lesson.phase("finish"):
        pipe.finish()
    left = [message.name for message in MESSAGES if not message.waited]
    run.forgotten, run.unread = left.count("isend"), left.count("irecv")
    run.live = len(pipe.live)
    true = reference.mean_loss(full(inputs), targets)
    true.backward()
    run.loss = not grid.last or allclose(torch.as_tensor(pipe.loss), true, *TIGHT)
    run.graph = getattr(pipe.loss, "requires_grad", False)
    true = list(
        reference.expected_gradients(
            full, lambda whole: reference.Stage(whole, grid)
        ).parameters()
    )
    found, m_times = [each.grad for each in stage.parameters()], [m * each for each in true]
    run.gradients, run.factor = (
        matching_name(found, *TIGHT, right=true, times_m=m_times),
        float(m),
    )
    if run.gradients == "other" and found[0] is not None:
        run.factor = ((found[0] * true[0]).sum() / true[0].square().sum()).item()
        scaled = [run.factor * each for each in true]
        run.gradients = matching_name(found, *TIGHT, times_m=scaled)
    if run.gradients == "other":
        run.gradients = kind_of_gradients(reference, grid, found, m)
    lesson.fact("finished", True)
    runs = gathered(run)
    due = sorted(f"{letter}{k}" for letter in "FB" for k in range(m))
    for run in runs:
        require(sorted(run.events) == due, f"rank {run.rank} runs {run}", "each_once")
        what = f"{run.live} micro-batches are live at the end of rank {run.rank}"
        require(not run.live, what, "not_forgotten")
        what = (
            f"after finish(), rank {run.rank} has not waited for {run.forgotten} of its sends"
        )
        require(not run.forgotten, what, "not_kept")
        what = f"rank {run.rank} has not waited for {run.unread} of its receives"
        require(not run.unread, what, "not_received")
        what = f"after backward(k), self.live of rank {run.rank} still has k, for k ="
        require(not run.stale, f"{what} {', '.join(map(str, run.stale))}", "other_micro_batch")
    return runs


def kind_of_gradients(
    reference: ModuleType, grid: Any, found: list[torch.Tensor], m: int
) -> str:
    """Return the common mistake that gives these gradients of a stage, or "other"."""
    tokens = reference.make_batches()[0]
    inputs, targets = tokens[:, :-1].chunk(m), tokens[:, 1:].chunk(m)
    candidates = {}
    for name, pairs in (
        ("last_only", [(inputs[-1], targets[-1])]),
        ("which_micro_batch", [(inputs[0], each) for each in targets]),
        ("which_micro_batch_", [(each, targets[0]) for each in inputs]),
    ):
        full = reference.build_model()
        for x, y in pairs:
            (reference.mean_loss(full(x), y) / m).backward()
        made = reference.expected_gradients(full, lambda whole: reference.Stage(whole, grid))
        candidates[name] = list(made.parameters())
    return matching_name(found, *TIGHT, **candidates).rstrip("_")


def check_numbers(runs: list[Run]) -> Judge:
    """Raise `Wrong` unless the gradients and the loss are those of one process."""
    m, pp = runs[0].m, runs[0].pp
    what = f"with {m} micro-batches the gradients are {runs[-1].factor:.3g} times those of one"
    what += " process"
    require(any(run.gradients != "times_m" for run in runs), what, "loss_not_divided")
    wrong = [run.stage for run in runs if run.gradients != "right"]
    if wrong:
        what = f"the gradients of stage {wrong[0]} are not those of one process"
        known = {run.gradients for run in runs} & {"last_only", "which_micro_batch"}
        require(not known, what, min(known, default=""))
        raise Wrong(what, "other" if pp - 1 in wrong else "sent_back")
    yield f"{pp} stages, {m} micro-batches: the gradients of one process"
    good = all(run.loss for run in runs)
    require(good, "self.loss is not the loss of one process", "loss_not_added")
    graph = any(run.graph for run in runs)
    require(not graph, "self.loss has a graph", "loss_not_added")


def check_leads(runs: list[Run]) -> None:
    """Raise `Wrong` if the stages did not warm up as in 1F1B. They need not have finished."""
    m, first, last = runs[0].m, runs[0], runs[-1]
    is_gpipe = all(run.lead == m for run in runs)
    require(not is_gpipe, f"stage 0 runs {first}", "not_1f1b")
    what = f"stage 0 runs {first.lead} forwards before its first backward, the last stage runs"
    is_reversed = last.lead > last.due and first.lead < first.due
    require(not is_reversed, f"{what} {last.lead}", "warm_up_backwards")
    for run in runs:
        what = f"with {m} micro-batches stage {run.stage} runs {run.lead} forwards before its"
        what += f" first backward, and {run.due} are due"
        require(run.lead <= run.due, what, "warm_up_long")
        require("B" not in run.letters or run.lead == run.due, what, "warm_up_short")


def stuck_in_pipeline(group: Group, leads: Sequence[int] = (8, 2)) -> None:
    """Raise `Wrong` with the reason why stages wait for each other.

    `leads` contains the numbers of micro-batches of the runs with the schedule 1F1B.
    """
    sending = [str(r) for r, is_waiting in enumerate(group.facts("in send")) if is_waiting]
    what = f"rank {', '.join(sending)} waits until a message that it has sent is received"
    require(not sending, what, "blocking_send")
    for r, rank in enumerate(group.ranks):  # a rank may have ended its schedule too early
        m = rank.facts.get("scheduled") or 0
        run = Run(**rank.facts[f"m={m}"]) if m and f"m={m}" in rank.facts else None
        is_complete = run is None or len(set(run.events)) == 2 * m
        require(is_complete, f"with {m} micro-batches rank {r} runs only {run}", "each_once")
    for m in leads:
        runs = [Run(**fact) for fact in group.facts(f"m={m}") if fact]
        if len(runs) == group.world:
            check_leads(runs)
    waiting = [str(r) for r, done in enumerate(group.facts("finished")) if not done]
    raise Wrong(f"rank {', '.join(waiting)} did not end", "pipeline_stuck")


PIPELINE = {
    "world_sizes": (2, 4, 1),
    "symmetric": False,
    "order_hint": "pipeline_stuck",
    "explain_hang": stuck_in_pipeline,
    "crashes": {
        "'NoneType' object has no attribute '(detach|contiguous|clone|data)'": "leaf",
        "parameter `tensor` of type torch.Tensor": "leaf",
        "'(NoneType|int)' object has no attribute|not (NoneType|int)$": "received",
        "implicitly created only for scalar": "start_gradient",
        "does not require grad": "detached",
        "only Tensors of floating point dtype": "tokens",
        "(too many|not enough) values to unpack|iteration over a 0-d": "live_pair",
        "Target .* is out of bounds": "loss_of_part",
        "not part of|not in group|Invalid rank|invalid rank": "group_rank",
        r"forward\(-": "stage_number",
        r"with 8 micro-batches": "each_once",
        r"with \d+ micro-batches": "few_micro_batches",
        "cannot unpack non-iterable": "send_pairs",
        r"^\d+$": "live_key",
    },
}


@LAB.step(
    6, "a pipeline",
    "GPipe has the loss and gradients of one process, in one pipeline and in two at once",
    "layers_of Pipeline gpipe", **PIPELINE | {
        "explain_hang": lambda group: stuck_in_pipeline(group, leads=()),
        "crashes": PIPELINE["crashes"] | {r"with \d+ micro-batches": "each_once"},
    },
)  # fmt: skip
def pipeline(submission, reference, lesson):
    for pp in (1, 2, 4):
        layers = [submission.layers_of(i, pp) for i in range(pp)]
        good = all(isinstance(each, Iterable) for each in layers)
        good = good and list(map(list, layers)) == [
            list(reference.layers_of(i, pp)) for i in range(pp)
        ]
        layers = ", ".join(map(str, layers))
        require(good, f"with {pp} stages, layers_of returns {layers}", "layers")
    m = 2 if lesson.world == 2 else 4  # 4 is also the number of rows and MICRO_BATCHES
    # with 2 stages on 4 ranks, the pp groups are 0 2 and 1 3
    for pp in (4, 2) if lesson.world == 4 else (lesson.world,):
        runs = run_pipeline(submission, reference, lesson, submission.gpipe, pp, m)
        for run in runs:
            what = f"rank {run.rank} runs {run}"
            require(run.letters == "F" * m + "B" * m, what, "not_gpipe")
            require(run.events[:m] == [f"F{k}" for k in range(m)], what, "each_once")
            what = f"rank {runs[0].rank} runs {runs[0]}, and {what}"
            require(run.events == runs[0].events, what, "same_order")
        yield from check_numbers(runs)
    if lesson.world == 1:  # a schedule that fails if micro-batches are confused
        run_pipeline(submission, reference, lesson, shuffled, 1, 4)


def shuffled(pipe: Any) -> None:
    """A schedule that runs the backwards in a different order from the forwards."""
    for k in range(4):
        pipe.forward(k)
    for k in (2, 0, 3, 1):
        pipe.backward(k)


@LAB.step(
    7, "one forward, one backward",
    "1F1B has the loss and gradients of one process, with p - i micro-batches live",
    "layers_of Pipeline one_f_one_b", own="layers_of Pipeline gpipe one_f_one_b", needs=(6,),
    **PIPELINE,
)  # fmt: skip
def one_each(submission, reference, lesson):
    two_pipelines = [(2, 2)] if lesson.world == 4 else []
    for pp, m in [(lesson.world, 8), (lesson.world, 2), *two_pipelines]:
        runs = run_pipeline(submission, reference, lesson, submission.one_f_one_b, pp, m)
        try:
            check_leads(runs)
        except Wrong as wrong:
            require(pp == lesson.world, f"in two pipelines, {wrong.what}", "stage_number")
            raise
        for run in runs:
            what, lead = f"stage {run.stage} runs {run}", run.due - 1
            in_order = sorted(run.events, key=lambda event: event[0]) == sorted(run.events)
            require(in_order, what, "backward_order")
            pairs = "F" * lead + "FB" * (m - lead) + "B" * lead
            require(run.letters == pairs, what, "not_1f1b")
        yield from check_numbers(runs)


# --- step 8 -------------------------------------------------------------------------------

LAYOUTS = {1: (1, 1), 2: (1, 1), 4: (1, 2), 8: (2, 2)}  # world: (pp, tp), the rest is dp


def is_cut(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "is_cut", False))


def gradient_value(i: int, parameter: nn.Parameter, replica: int, shard: int) -> float:
    """Return the value of all gradients of parameter i on a rank."""
    return i + 1 + 7.3 * replica + (100 * shard if is_cut(parameter) else 0)


@LAB.step(
    8, "all three",
    "data, gradients and norm go along their own axes, and three steps of training have "
    "the losses of one process",
    "my_share average_gradients clip_gradients train", world_sizes=(4, 8, 2, 1),
    symmetric=False,
    order_hint="averaged_over_all",
    crashes={"has no attribute 'is_cut'": "unmarked"},
)  # fmt: skip
def composition(submission, reference, lesson):
    grid = reference.Grid(*LAYOUTS[lesson.world])
    place = grid.stage, grid.replica, grid.shard
    rows = torch.arange(16).view(16, 1).expand(16, 3).clone()
    share = submission.my_share(rows, grid)
    require(share is not None, f"my_share returns None on rank {lesson.rank}", "returned")
    share = torch.as_tensor(share)
    what = f"of a batch of shape [16, 3], my_share returns the shape {[*share.shape]}"
    require(share.shape[1:] == (3,), what, "share_columns")
    share = share[:, 0].tolist()
    check_share(gathered((grid.replica, tuple(share))))
    yield "every replica has its share of the samples, the same on all of its ranks"

    stage = reference.Stage(reference.build_model(), grid)
    parameters = list(stage.parameters())
    for i, parameter in enumerate(parameters):
        own = gradient_value(i, parameter, grid.replica, grid.shard)
        parameter.grad = torch.full_like(parameter, own)
    with lesson.phase("average"):
        submission.average_gradients(stage, grid)
    check_average(lesson, grid, parameters)
    yield "gradients are averaged over the replicas"

    owns = [gradient_value(i, each, 0, grid.shard) / 100 for i, each in enumerate(parameters)]
    squares = [0.0, 0.0]  # sums of squares: of whole parameters, and of cut parameters
    for parameter, own in zip(parameters, owns, strict=True):
        squares[is_cut(parameter)] += parameter.numel() * own**2
    # in the last trial the norm is about 1e-6, so a missing 1e-6 changes the factor
    for limit, scale in ((1.0, 1.0), (1e6, 1.0), (1e-7, 1e-8)):
        for parameter, own in zip(parameters, owns, strict=True):
            parameter.grad = torch.full_like(parameter, scale * own)
        with lesson.phase("clip" if scale == 1 else ""):  # the score counts two trials
            norm = submission.clip_gradients(stage, grid, limit)
        what = f"clip_gradients returns None on rank {lesson.rank}"
        require(norm is not None, what, "norm_returned")
        norm = float(norm)
        if limit == 1.0:
            ranks, norms = zip(*gathered(((place, squares), norm)), strict=True)
            check_norm(lesson.rank, norms, ranks, limit)
            yield "the norm is that of the whole model's gradient"
        pairs = zip(parameters, owns, strict=True)
        factors = [
            (parameter.grad.flatten()[0] / own / scale).item() for parameter, own in pairs
        ]
        due = min(1.0, limit / (norm + 1e-6))
        what = f"norm {norm:.4g}, limit {limit:g}: rank {lesson.rank} scales by"
        hint = "clip_grows" if limit > 1 and max(factors) > 1 else "not_clipped"
        if limit < 1 and all(isclose(factor, limit / norm, 1e-4) for factor in factors):
            hint = "epsilon"
        good = all(isclose(factor, due, 1e-4) for factor in factors)
        require(good, f"{what} {min(factors):.4g}", hint)

    batches = reference.make_batches()[:3]
    submission.make_batches = reference.make_batches = lambda: batches
    losses, norms, _ = submission.train(grid, torch.device("cpu"))
    true_losses, true_norms = reference.train_alone()
    what = f"in training the losses are {losses}, of one process {true_losses}"
    good = allclose([losses, norms], [true_losses, true_norms], 1e-5, 0)
    require(good, what, "other")


def check_share(shares: list[tuple[int, tuple[int, ...]]]) -> None:
    """Raise `Wrong` unless the shares of the ranks are right. `shares` has (replica, rows)."""
    what = f"the ranks read {'; '.join(' '.join(map(str, share)) for _, share in shares)}"
    of_replica = dict(shares)
    require(
        all(of_replica[replica] == share for replica, share in shares), what, "share_by_rank"
    )
    require(len(of_replica) == 1 or len(set(of_replica.values())) > 1, what, "share_same")
    require(
        sorted(itertools.chain(*of_replica.values())) == list(range(16)), what, "share_lost"
    )
    require(len(set(map(len, of_replica.values()))) == 1, what, "share_lost")


def check_average(lesson: Lesson, grid: Any, parameters: list[nn.Parameter]) -> None:
    """Raise `Wrong` with the ranks whose gradients were averaged, unless the mean is right."""
    replicas, shards, wrong = range(grid.dp), range(grid.tp), []
    for i, parameter in enumerate(parameters):
        over_dp = sum(gradient_value(i, parameter, r, grid.shard) for r in replicas)
        own = gradient_value(i, parameter, grid.replica, grid.shard)
        over_all = sum(gradient_value(i, parameter, r, s) for r in replicas for s in shards)
        known = {
            "right": over_dp / grid.dp,
            "those of this replica alone": own,
            "those of this replica alone, divided": own / grid.dp,
            "the sum over the replicas": over_dp,
            "the sum over the replicas, divided by all ranks": over_dp / lesson.world,
            "the mean over all ranks": over_all / (grid.dp * grid.tp),
            "a sum over all ranks": over_all / grid.dp,
        }
        known = {name: torch.full_like(parameter, each) for name, each in known.items()}
        name = matching_name(parameter.grad, *TIGHT, **known)
        wrong += [] if name == "right" else [(name, is_cut(parameter))]
    if wrong:
        is_late = any(
            c.asynchronous and not c.returned for c in lesson.calls if c.phase == "average"
        )
        require(
            not is_late, f"on rank {lesson.rank} nothing waits for an all-reduce", "not_waited"
        )
        kinds = {name for name, _ in wrong}
        what = f"of {len(parameters)} gradients on rank {lesson.rank} {len(wrong)} are wrong"
        what += f": {', '.join(sorted(kinds - {'other'}))}" * (kinds != {"other"})
        only_own = all(kind.startswith("those of this replica") for kind in kinds)
        require(not only_own, what, "not_averaged")
        require(any(cut for _, cut in wrong), what, "whole_reduced")
        divisor = all(kind.startswith("the sum over the replicas") for kind in kinds)
        require(not divisor, what, "average_divisor")
        raise Wrong(what, "averaged_over_all")


def check_norm(
    rank: int, found: Sequence[float], ranks: Sequence[tuple[tuple, list[float]]], limit: float
) -> None:
    """Raise `Wrong` with the mistake that gives this norm, unless the norm is right.

    `found` contains the norm on each rank. `ranks` contains, for each rank, its stage, replica
    and shard, and the sums of squares of its whole and of its cut parameters.
    """
    are_equal, found = all(isclose(each, found[rank]) for each in found), found[rank]
    own, _ = ranks[rank]

    def total(axes: Sequence[int], copies: bool = False, whole: bool = True) -> float:
        """Return the norm over the ranks that differ from this rank only along these axes."""
        result = 0.0
        for place, (whole_part, cut_part) in ranks:
            if all(place[axis] == own[axis] for axis in range(3) if axis not in axes):
                counts = copies or place[2] == (0 if 2 in axes else own[2])
                result += cut_part + (whole_part if counts and whole else 0.0)
        return math.sqrt(result)

    true, is_first = total((0, 2)), own[2] == 0
    what = f"rank {rank} finds the norm {found:.4f}, that of the whole model is {true:.4f}"
    mine = [(place, squares) for place, squares in ranks if place[1] == own[1]]
    norms = [math.sqrt(sum(squares)) for _, squares in mine]
    once = [math.sqrt(sum(squares[place[2] > 0 :])) for place, squares in mine]
    first = math.sqrt(sum(sum(squares) for place, squares in mine if place[2] == 0))
    known = {
        "norm_one_shard": first if are_equal else [],
        "norm_of_norms": [true**2, sum(norms), sum(once)],
        "norm_returned": true * min(1.0, limit / (true + 1e-6)),
        "norm_local": [total(()), total((), whole=is_first)],
        "norm_copies": total((0, 2), copies=True),
        "norm_missed": total((0, 2), whole=False),
        "norm_replicas": [total((0, 1, 2)), total((0, 1, 2), copies=True)],
        "norm_one_axis": [total((2,)), total((0,)), total((0,), whole=is_first)],
    }
    require(isclose(found, true), what, matching_hint(found, known))
