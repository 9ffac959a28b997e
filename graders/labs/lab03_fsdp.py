"""Grade lab 03: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. The models here are small, in float64, and of sizes that make padding necessary. If a
number is wrong, it is compared with the numbers that common mistakes give. If it equals one of
these, this mistake determines the hint.
"""

import contextlib
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it; import it here once for all processes
import torch.distributed as dist
import torch.distributed.checkpoint  # step 7 needs it; imported here for the same reason
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from graders.dsl import Lab, Lesson, allclose, matching_name, require, show

LAB = Lab()
DTYPE, TIGHT = torch.float64, (1e-6, 1e-10)
ASYNC_COLLECTIVES = (  # their asynchronous calls deliver the result late
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_gather",
    "all_gather_into_tensor", "all_gather_single", "broadcast", "reduce",
)  # fmt: skip
WIDTH, HIDDEN, BLOCKS = 3, 5, 2  # 2 ranks pad the blocks, and 3 ranks pad the first unit
ROWS = 12
NO_LIST = r"of type List\[torch.Tensor\]"  # torch's error if it gets a tensor and not a list


def expect(lesson: Lesson, good: Any, what: str, hint: str = "other") -> None:
    """Raise `Wrong` with a sentence about this rank, unless `good` is true.

    All ranks wait for each other first, so that each rank with a wrong result can report it.
    """
    lesson.wait_for_ranks()
    require(good, f"on rank {lesson.rank}, {what}", hint)


class LateWork:
    """The Work of an asynchronous collective, which delivers its result in `wait`."""

    def __init__(self, work: dist.Work, deliver: Callable[[], None]):
        self.work, self.deliver = work, deliver

    def wait(self, *args: Any) -> bool:
        done = self.work.wait(*args)
        self.deliver()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


def deliver_late() -> None:
    """Let asynchronous collectives write their outputs in `wait()`, and not earlier."""
    for name in ASYNC_COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, with_late_result(getattr(dist, name)))


def with_late_result(real: Callable) -> Callable:
    """Return the collective. Its asynchronous calls write their output in wait()."""

    def collective(output: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return real(output, *args, **kwargs)
        outputs = output if isinstance(output, list) else [output]
        results = [torch.empty_like(each) for each in outputs]
        work = real(results if isinstance(output, list) else results[0], *args, **kwargs)

        def deliver() -> None:
            for each, result in zip(outputs, results, strict=True):
                each.detach().copy_(result)

        return LateWork(work, deliver)

    return collective


def require_no_all_reduce(lesson: Lesson, begin: int, shard: int) -> None:
    """Raise `Wrong` if a collective from number `begin` on all-reduced a whole gradient.

    A whole gradient has more elements than a shard, which has `shard` elements.
    """
    names = [call.name for call in lesson.calls[begin:] if call.numel > shard]
    used = any(name.startswith("all_reduce") for name in names)
    expect(lesson, not used, "the whole gradient is all-reduced", "all_reduced")


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def small_model(reference: ModuleType) -> nn.Module:
    torch.manual_seed(7)
    return reference.Net(WIDTH, HIDDEN, BLOCKS).double()


def rows(lesson: Lesson, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of all ranks, and those of this rank."""
    x = random(ROWS, WIDTH, seed=step)
    return x, x.chunk(lesson.world)[lesson.rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sin()).square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of the mean loss over these rows."""
    return list(torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def whole_values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]


def train_alone(reference: ModuleType, steps: int) -> nn.Module:
    """Return the model that one process has after this number of training steps."""
    model = small_model(reference)
    adam = reference.make_adam(list(model.parameters()))
    for step in range(steps):
        adam.zero_grad()
        loss_of(model, random(ROWS, WIDTH, seed=step)).backward()
        adam.step()
    return model


def flat_parts(tensors: Iterable[torch.Tensor], n: int) -> list[torch.Tensor]:
    """Return all values in n equal parts. The last parts are padded with zeros."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return list(torch.cat([flat, flat.new_zeros(-len(flat) % n)]).chunk(n))


def by_unit(
    model: nn.Module, tensors: Iterable[torch.Tensor], n: int
) -> list[list[torch.Tensor]]:
    """Return n equal parts for each unit. `tensors` has one tensor for each parameter."""
    remaining = iter(tensors)
    return [flat_parts([next(remaining) for _ in u.parameters()], n) for u in model.units()]


# --- step 1 -------------------------------------------------------------------------------

SIZES = ((1200, 4), (1001, 3), (7_000_000_001, 64))
CASES = (  # Ψ, number of ranks, limit, room, and the right stage
    (1200, 4, 20_000, 0, 0),
    (1200, 4, 12_000, 0, 1),
    (1200, 4, 12_000, 1, 2),
    (1200, 4, 5_800, 1_000, 3),
    (1200, 4, 4_799, 0, None),
    (1200, 1, 19_000, 0, None),
)


@LAB.alone(
    1, "count the memory of each stage", "the bytes of every stage, and the smallest that fits",
    "bytes_per_rank smallest_stage",
)  # fmt: skip
def count(submission, reference, lesson):
    for psi, n in SIZES:
        for stage in range(4):
            found = submission.bytes_per_rank(psi, n, stage)
            case = f"for Ψ = {psi:,}, N = {n} and stage {stage}, bytes_per_rank returns"
            numbers = isinstance(found, (tuple, list)) and len(found) == 3
            numbers = numbers and all(isinstance(number, (int, float)) for number in found)
            require(numbers, f"{case} {found}", "bytes")
            found, true = list(found), list(reference.bytes_per_rank(psi, n, stage))
            kinds = "parameters", "gradients", "moments"
            wrong = [
                f"{a:,} bytes for the {kind} instead of {b:,}"
                for kind, a, b in zip(kinds, found, true, strict=True)
                if a != b
            ]
            what = f"{case} {' and '.join(wrong)}"
            close = all(abs(a - b) <= 16 for a, b in zip(found, true, strict=True))
            hint = "round_up" if psi % n and close else "sharded"
            require(found == true, what, hint if stage else "bytes")
    yield "the bytes of every stage are right"
    submission.bytes_per_rank = reference.bytes_per_rank
    for psi, n, limit, room, stage in CASES:
        found = submission.smallest_stage(psi, n, limit, room)
        case = f"for Ψ = {psi:,}, N = {n}, limit = {limit:,} and room = {room:,}"
        what = f"{case}, smallest_stage returns {found}, but {stage} is right"
        hint = "none_fits"
        if stage is not None:
            hint = "room" if room and (found or 0) < stage else "smallest"
        require(found == stage, what, hint)


# --- step 2 -------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def require_layout(submission: ModuleType, lesson: Lesson, n: int) -> None:
    """Raise `Wrong` unless lay_out makes the right flat tensor and views of four tensors."""
    shapes = ((2, 3), (5,), (1, 1), (1,))
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes, start=1)]
    result, true = submission.lay_out(tensors, n), torch.cat(flat_parts(tensors, n))
    case = f"lay_out of tensors with 13 elements for n = {n}"
    pair = isinstance(result, (tuple, list)) and len(result) == 2
    what = f"{case} returns a {type(result).__name__}"
    expect(lesson, pair and isinstance(result[0], torch.Tensor), what, "layout_returned")
    flat, views = result
    size = f"{flat.numel()} elements" if flat.dim() == 1 else f"shape {list(flat.shape)}"
    what = f"{case} returns a flat tensor of {size} instead of {len(true)} elements"
    expect(lesson, flat.shape == true.shape, what, "layout_length")
    what = f"{case} returns a tensor of {flat.dtype} for tensors of {true.dtype}"
    expect(lesson, flat.dtype == true.dtype, what, "layout_dtype")
    what = f"{case} returns a flat tensor with wrong values"
    expect(lesson, allclose(flat, true, *TIGHT), what, "layout_values")
    good = len(views) == len(tensors) and allclose(list(views), tensors, *TIGHT)
    good = good and all(memory_of(view) == memory_of(flat) for view in views)
    what = f"the second result of {case} is not a list of views in the tensors' shapes"
    expect(lesson, good, what, "layout_views")


def expect_part(
    lesson: Lesson, what: str, gradient: Any, parts: list, own: list, other: str = "other"
) -> None:
    """Raise `Wrong` unless `gradient` is this rank's part of the mean gradient.

    `parts` contains the parts of the mean gradient, and `own` those of the gradient of this
    rank's rows. `other` is the hint if no common mistake gives this gradient.
    """
    n, rank = lesson.world, lesson.rank
    known = {"right": parts[rank], "the sum over the ranks": n * parts[rank]}
    known |= {"the mean divided by N again": parts[rank] / n}
    known |= {"the gradient of this rank's own rows": own[rank]}
    known |= {"this rank's own gradient divided by N": own[rank] / n}
    others = [(r, part) for r, part in enumerate(parts) if r != rank]
    known |= {f"the mean of part {r}": part for r, part in others}
    known |= {f"the sum of part {r}": n * part for r, part in others}
    known |= {f"part {r} of this rank's own gradient": own[r] for r, _ in others}
    found = matching_name(gradient, *TIGHT, **known)
    hints = dict(zip(known, ("", "mean", "mean", "not_reduced", "not_reduced"), strict=False))
    hints |= {"none": "not_reduced", "other": other}
    names = {"none": "None", "other": "not the mean over the ranks"}
    sentence = f"{what} is {names.get(found, found)}"
    expect(lesson, found == "right", sentence, hints.get(found, "wrong_part"))


@LAB.step(
    2, "ZeRO-1, shard the optimizer",
    "the parameters of one process, with moments of a shard", "lay_out ZeRO1",
    crashes={NO_LIST: "chunk_list"},
)  # fmt: skip
def zero1(submission, reference, lesson):
    n, rank = lesson.world, lesson.rank
    for count in (
        1,
        4,
        13,
        17,
    ):  # with 13 there is no padding, and with 17 there are more ranks than numbers
        require_layout(submission, lesson, count)
    yield "lay_out returns one flat tensor and views of it"

    submission.lay_out = reference.lay_out
    deliver_late()
    model = small_model(reference)
    mine = flat_parts(model.parameters(), n)[rank]
    engine = submission.ZeRO1(model)
    good = allclose(engine.shard, mine, *TIGHT)
    what = f"self.shard is not part {rank} of {n} of the flat tensor"
    expect(lesson, good, what, "shard_part")
    shared = memory_of(engine.shard) == memory_of(engine.flat)
    expect(lesson, shared, "self.shard is a copy of its part", "shard_memory")
    updated = [p for group in engine.adam.param_groups for p in group["params"]]
    only_shard = len(updated) == 1 and updated[0] is engine.shard
    count = sum(p.numel() for p in updated)
    what = f"Adam updates {count} elements, and not only the {len(mine)} of self.shard"
    expect(lesson, only_shard, what, "adam_whole")
    yield "every rank has its shard, and an Adam that updates only the shard"

    seen: list[Any] = []
    engine.adam.register_step_pre_hook(lambda *_: seen.append(deepcopy(engine.shard.grad)))
    x, own = rows(lesson, 0)
    whole, local = (flat_parts(gradients(small_model(reference), part), n) for part in (x, own))
    begin = len(lesson.calls)
    with lesson.phase("a step"):
        loss_of(model, own).backward()
        engine.step()
    expect(lesson, seen, "step() did not call self.adam.step()", "not_updated")
    expect_part(lesson, "the shard's gradient in Adam's step", seen[0], whole, local)
    require_no_all_reduce(lesson, begin, len(mine))
    yield "Adam gets the mean gradient of the shard"
    found, true = (flat_parts(m.parameters(), n) for m in (model, train_alone(reference, 1)))
    good = allclose(found, true, *TIGHT)
    own_only = not good and allclose(found[rank], true[rank], *TIGHT)
    what = "after the step, only the parameters of this rank's shard are updated"
    expect(lesson, not own_only, what, "not_passed_round")
    expect(lesson, good, "after the step, the parameters are not those of one process")


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "ZeRO-2, shard the gradients",
    "the parameters of one process, with gradients and moments of a shard", "Bucket ZeRO2",
    crashes={
        NO_LIST: "chunk_list",
        "NoneType' object has no attribute '(numel|flatten|reshape|view)": "freed_early",
    },
)  # fmt: skip
def zero2(submission, reference, lesson):
    deliver_late()
    model = small_model(reference)
    engine, units = submission.ZeRO2(model), len(model.units())
    for step in range(2):
        where, (x, own) = f"backward {step + 1}", rows(lesson, step)
        begin = len(lesson.calls)
        before, trained = train_alone(reference, step), train_alone(reference, step + 1)
        whole, local = (
            by_unit(before, gradients(before, part), lesson.world) for part in (x, own)
        )
        with lesson.phase(where):
            loss_of(model, own).backward()
        names = [call.name for call in lesson.calls[begin:]]
        count = sum(name.startswith("reduce_scatter") for name in names)
        found = [bucket.shard.grad for bucket in engine.buckets]
        require_no_all_reduce(
            lesson, begin, max(len(bucket.shard) for bucket in engine.buckets)
        )
        what = f"{where} called {count} reduce-scatters for {units} units"
        expect(lesson, count <= units, what, "each_parameter")
        missing = any(gradient is None for gradient in found)
        expect(lesson, not missing or step, what, "late")
        expect(lesson, not missing, what, "restart")
        for place, (gradient, parts, mine) in enumerate(zip(found, whole, local, strict=True)):
            what = f"after {where}, shard.grad of unit {place}"
            expect_part(lesson, what, gradient, parts, mine, "gradient_order")
        count = sum(parameter.grad is not None for parameter in model.parameters())
        what = f"{count} parameters still have a whole gradient after {where}"
        expect(lesson, not count, what, "not_freed")
        yield f"after {where}, each rank has its shards of the gradients and no whole gradient"
        with lesson.phase("update"):
            engine.step()
        found, old, true = (list(each.parameters()) for each in (model, before, trained))
        right, changed = allclose(found, true, *TIGHT), not allclose(found, old, *TIGHT)
        what = f"step {step + 1} does not change the parameters"
        expect(lesson, right or changed, what, "not_updated")
        what = f"after step {step + 1}, the parameters are not those of one process"
        expect(lesson, right, what, "not_passed_round")
        count = sum(bucket.shard.grad is not None for bucket in engine.buckets)
        what = f"{count} buckets still have a gradient after step {step + 1}"
        expect(lesson, not count, what, "shard_gradient_kept")


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "ZeRO-3, shard the parameters",
    "the parameters of one process, with a shard of everything", "Unit ZeRO3",
    crashes={
        NO_LIST: "chunk_list",
        r"takes \d+ positional arguments? but": "hook_call",
        "has changed the (size|type) of value": "hook_returns",
        "out of bounds for storage of size 0": "gathered",
        "doesn't require gradient": "free",
        "modified (inplace|by an inplace)": "no_graph",
    },
)  # fmt: skip
def zero3(submission, reference, lesson):
    n, rank = lesson.world, lesson.rank
    deliver_late()
    unit = submission.Unit(small_model(reference).blocks[0])
    full = torch.cat(flat_parts(small_model(reference).blocks[0].parameters(), n))

    def size() -> int:
        return unit.whole.untyped_storage().nbytes()

    def expect_size(when: str, wanted: int, hint: str) -> None:
        what = f"the storage of `whole` has {size()} bytes instead of {wanted} {when}"
        expect(lesson, size() == wanted, what, hint)

    what = f"`whole` has {unit.whole.numel()} elements instead of {len(full)} after free()"
    expect(lesson, unit.whole.shape == full.shape, what, "free")
    expect_size("after free()", 0, "free")
    yield "free() releases the memory"
    error = ""
    try:
        unit.gather()
    except RuntimeError as raised:  # the storage may have no memory; then the size is wrong
        error = str(raised).strip().splitlines()[0]
    expect_size("after gather()", full.nbytes, "storage")
    expect(lesson, not error, f"gather() raises RuntimeError: {error}", "no_graph")
    good = allclose(unit.whole, full, *TIGHT)
    expect(lesson, good, "`whole` has wrong values after gather()", "gathered")
    yield "gather() allocates the memory again and fills it"
    unit.whole.untyped_storage().resize_(0)
    with contextlib.suppress(RuntimeError):
        unit.before_forward(None, ())
    whole = size() > 0 and allclose(unit.whole, full, *TIGHT)
    what = "after before_forward(), `whole` does not contain the parameters"
    expect(lesson, whole, what, "before_forward")
    leaf = torch.ones(2, 3, dtype=DTYPE, requires_grad=True)
    output = leaf * 1
    unit.after_forward(None, (), output)
    expect_size("after after_forward()", 0, "after_forward")
    output.backward(torch.full_like(output, 3.0))
    when = "when the gradient of the unit's output is known"
    expect_size(when, full.nbytes, "backward_gather")
    is_unchanged = allclose(leaf.grad, torch.full_like(leaf, 3.0), *TIGHT)
    what = "the hook changes the gradient of the output"
    expect(lesson, is_unchanged, what, "hook_returns")
    yield "a unit is whole during its forward and backward pass, and not between them"
    of_ranks, begin = [random(len(full), seed=20 + r) for r in range(n)], len(lesson.calls)
    mean, own = (sum(of_ranks) / n).chunk(n), of_ranks[rank].chunk(n)
    unit.whole.grad = of_ranks[rank].clone()
    unit.reduce_gradient(unit.whole)
    expect_part(lesson, "shard.grad after reduce_gradient()", unit.shard.grad, mean, own)
    require_no_all_reduce(lesson, begin, len(unit.shard))
    is_none = unit.whole.grad is None
    what = "after reduce_gradient(), whole.grad is not None"
    expect(lesson, is_none, what, "whole_gradient_kept")
    expect_size("after reduce_gradient()", 0, "backward_free")
    model = small_model(reference)
    engine = submission.ZeRO3(model)
    for step in range(2):
        with lesson.phase("a step"):
            loss_of(model, rows(lesson, step)[1]).backward()
            engine.step()
    true = train_alone(reference, 2)
    parts = [parts[rank] for parts in by_unit(true, true.parameters(), n)]
    good = allclose([unit.shard for unit in engine.units], parts, *TIGHT)
    expect(lesson, good, "after two steps, the shards are not those of one process")


# --- step 5 -------------------------------------------------------------------------------


@LAB.step(
    5, "FSDP2's fully_shard",
    "one unit for each of model.units(), freed after its forward, and Adam for the shards",
    "shard_model",
)  # fmt: skip
def fsdp2(submission, reference, lesson):
    real = reference.fully_shard

    def fully_shard(module: Any, **kwargs: Any) -> Any:
        require(
            kwargs.get("mesh") is not None, "fully_shard is called without a mesh", "no_mesh"
        )
        parts = module if isinstance(module, (list, tuple)) else [module]
        inner = [m for part in parts for m in part.modules() if m is not part]
        after_root = any(isinstance(p, DTensor) for part in parts for p in part.parameters())
        after_root = after_root and not any(isinstance(m, FSDPModule) for m in inner)
        what = "fully_shard is called for a module after a call for the module that contains it"
        require(not after_root, what, "root_alone")
        return real(module, **kwargs)

    submission.fully_shard = fully_shard
    returned = submission.shard_model(small_model(reference))
    pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    what = f"shard_model returns a {type(returned).__name__} instead of model and optimizer"
    require(pair, what, "two_results")
    model, adam = returned
    units, root = model.units(), isinstance(model, FSDPModule)
    missing = sum(not isinstance(unit, FSDPModule) for unit in units)
    what = f"the model and {missing} of its {len(units)} units are not FSDPModules"
    require(root or not missing, what, "not_wrapped")
    require(not missing, f"{missing} of {len(units)} units are not wrapped", "root_alone")
    require(root, "the model itself is not an FSDPModule", "no_root")
    fine = any(isinstance(m, FSDPModule) for b in model.blocks for m in (b.up, b.down))
    require(not fine, "layers inside the blocks are FSDPModules", "too_fine")
    yield "the model and every unit are wrapped"
    updated = {id(p) for group in adam.param_groups for p in group["params"]}
    right = updated == {id(p) for p in model.parameters()}
    require(right, "Adam does not update the parameters of the model", "stale")
    begin = len(lesson.calls)
    loss = loss_of(model, rows(lesson, 0)[1])
    gathers = sum(call.name.startswith("all_gather") for call in lesson.calls[begin:])
    what = f"a forward pass calls {gathers} all-gathers for {len(units)} units"
    require(lesson.world == 1 or gathers == len(units), what, "root_alone")
    whole = sum(not isinstance(p, DTensor) for u in units[:-1] for p in u.parameters())
    require(not whole, f"{whole} parameters are whole between forward and backward", "reshard")
    loss.backward()
    found = [parameter.grad.full_tensor() for parameter in model.parameters()]
    good = allclose(found, gradients(small_model(reference), rows(lesson, 0)[0]), *TIGHT)
    expect(lesson, good, "the gradients are not those of one process", "precision")
    adam.step()
    found = whole_values(model)
    true = list(train_alone(reference, 1).parameters())
    what = "after a step, the parameters are not those of one process"
    expect(lesson, allclose(found, true, *TIGHT), what, "make_adam")


# --- step 6 -------------------------------------------------------------------------------


@LAB.step(
    6, "clipping and micro-batches",
    "the norm of the whole gradient, and the gradient of all rows", "clip_gradients accumulate",
)  # fmt: skip
def clip(submission, reference, lesson):
    n, rank = lesson.world, lesson.rank
    shards = [[random(3, seed=10 * r), random(4 - r, 2, seed=10 * r + 1)] for r in range(n)]
    norms = torch.stack([torch.cat([t.flatten() for t in part]).norm() for part in shards])
    norm = norms.square().sum().sqrt()
    hints = {
        "norm_local": norms[rank], "norm_of_norms": norms.sum(), "norm_square": norm.square()
    }  # fmt: skip
    names = {
        "norm_local": "the norm of this rank's shards", "none": "None",
        "norm_of_norms": "the sum of the ranks' norms", "norm_square": "the sum of squares",
        "norm_returned": "the norm after scaling",
    }  # fmt: skip
    for where, factor, hint in (("above", 0.1, "not_scaled"), ("below", 2.0, "grows")):
        mine, limit = [t.clone() for t in shards[rank]], factor * norm.item()
        found = submission.clip_gradients(mine, limit)
        if found is not None:
            found = torch.as_tensor(found, dtype=DTYPE).detach().reshape(())
        scaled = torch.tensor(limit, dtype=DTYPE)
        found = matching_name(found, *TIGHT, right=norm, **hints, norm_returned=scaled)
        what = f"clip_gradients returns {names.get(found, 'a wrong norm')}"
        named = {"none": "norm_returned", "other": "norm_tensors"}.get(found, found)
        expect(lesson, found == "right", what, named)
        scale = min(1.0, limit / (norm.item() + 1e-6))
        good = allclose(mine, [scale * t for t in shards[rank]])
        what = f"gradients whose norm is {where} the limit are wrong after clip_gradients"
        expect(lesson, good, what, hint)
    yield "clip_gradients computes the norm over all ranks, and scales the gradients with it"

    submission.clip_gradients = reference.clip_gradients
    model, _ = reference.shard_model(small_model(reference))
    x, own = rows(lesson, 0)
    events: list[str] = []
    model.register_forward_pre_hook(lambda *_: events.append("forward"))
    model.last.register_full_backward_pre_hook(lambda *_: events.append("backward"))
    m, begin = (2 if n == 3 else 3), len(lesson.calls)
    loss = submission.accumulate(model, own, own.sin(), m)
    forwards = events.count("forward")
    what = f"accumulate runs {forwards} forward passes for {m} micro-batches"
    expect(lesson, forwards == m, what, "one_forward")
    what = "a forward pass begins before the backward pass of the previous micro-batch"
    expect(lesson, events == ["forward", "backward"] * m, what, "one_backward")
    names = [call.name for call in lesson.calls[begin:]]
    count, needed = (
        sum(name.startswith("reduce_scatter") for name in names),
        m * len(model.units()),
    )
    what = f"{m} micro-batches call {count} reduce-scatters instead of {needed}"
    expect(lesson, n == 1 or count >= needed, what, "no_sync")
    grads, found = [p.grad for p in model.parameters()], "none"
    if all(grad is not None for grad in grads):
        whole = torch.cat([grad.full_tensor().flatten() for grad in grads])
        last = torch.cat([part.chunk(m)[-1] for part in x.chunk(n)])
        true, late = (
            torch.cat([grad.flatten() for grad in gradients(small_model(reference), part)])
            for part in (x, last)
        )
        found = matching_name(
            whole, *TIGHT, right=true, loss_share=m * true, fsdp_averages=true / n,
            gradient_lost=late / m,
        )  # fmt: skip
    names = {
        "none": "None", "loss_share": f"{m} times the gradient of the mean loss",
        "fsdp_averages": "the gradient of the mean loss divided by the number of ranks",
        "gradient_lost": "the gradient of the last micro-batch alone",
    }  # fmt: skip
    what = f"the accumulated gradient is {names.get(found, 'not that of the mean loss')}"
    named = {"none": "gradient_lost"}.get(found, found)
    expect(lesson, found == "right", what, named)
    yield "the accumulated gradient is that of all rows"
    what = f"accumulate returns a {type(loss).__name__}"
    expect(lesson, isinstance(loss, torch.Tensor), what, "loss_returned")
    what = "the loss that accumulate returns is not detached"
    expect(lesson, not loss.requires_grad, what, "loss_returned")
    true = loss_of(small_model(reference), own).item()
    good = loss.numel() == 1 and allclose(loss.reshape(()), true, *TIGHT)
    what = f"accumulate returns {show(loss.tolist())}, but the mean loss is {true:.3g}"
    expect(lesson, good, what, "loss_returned")


# --- step 7 -------------------------------------------------------------------------------


@LAB.step(
    7, "a checkpoint for any number of ranks",
    "what was saved, bit for bit, on as many ranks and on fewer", "save load", symmetric=False,
    crashes={"state_dict is empty": "moments_lost", "CheckpointException": "key_lost"},
)  # fmt: skip
def checkpoint(submission, reference, lesson):
    model, adam = reference.shard_model(small_model(reference))
    loss_of(model, rows(lesson, 0)[1]).backward()
    adam.step()
    adam.zero_grad()
    adam.param_groups[0]["lr"] = 0.25  # as if a schedule had changed it
    values, saved = whole_values(model), reference.every_bit(model, adam)
    folder = Path("checkpoint")  # in a folder of this group, which the supervisor removes
    whole: list[bool] = []
    real = torch.distributed.checkpoint.save

    def record(state: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.dim()]
        whole.extend(not isinstance(tensor, DTensor) for tensor in tensors)
        return real(state, *args, **kwargs)

    with mock.patch.object(torch.distributed.checkpoint, "save", record):
        submission.save(model, adam, 41, folder)
    lesson.fact("saved", True)
    lesson.wait_for_ranks()
    files = len(list(folder.glob("*.distcp")))
    what = f"save() on {lesson.world} ranks wrote {files} files of shards"
    require(files == lesson.world, what, "one_writer")
    what = "save() writes whole tensors instead of DTensors"
    require(not any(whole), what, "one_writer")
    for n in sorted({lesson.world, max(lesson.world - 1, 1)}, reverse=True):
        mesh = DeviceMesh("cpu", list(range(n)))
        if lesson.rank >= n:
            break
        new_model = small_model(reference)
        with torch.no_grad():
            for parameter in new_model.parameters():
                parameter.fill_(7.0)
        for part in [*new_model.units(), new_model]:
            reference.fully_shard(part, mesh=mesh)
        new_adam = reference.make_adam(list(new_model.parameters()))
        step = submission.load(new_model, new_adam, folder, mesh.get_group())
        bits = reference.every_bit(new_model, new_adam)
        case = f"after a load by {n} of {lesson.world} ranks,"
        right = all(map(torch.equal, whole_values(new_model), values))
        require(right, f"{case} the parameters are not the saved ones", "parameters_lost")
        right = len(bits) == len(saved) and all(map(torch.equal, bits, saved))
        require(right, f"{case} the moments are not the saved ones", "moments_lost")
        require(step == 41, f"{case} load returns {step} instead of step 41", "step_lost")
        rate = float(new_adam.param_groups[0]["lr"])
        what = f"{case} the learning rate is {rate} instead of 0.25, which was saved"
        require(rate == 0.25, what, "not_set")
        yield f"what {lesson.world} ranks saved and {n} loaded is equal bit for bit"
    if (
        lesson.rank < n < lesson.world
    ):  # without the group, save() would wait for the other ranks
        submission.save(new_model, new_adam, 42, Path("again"), mesh.get_group())


@checkpoint.explain_hang
def _(group):
    """Raise `Wrong` if only some ranks saved, or if some ranks wait for the others."""
    saved = group.facts("saved")
    require(any(saved) is all(saved), "save() did not return on all ranks", "one_writer")
    is_waiting = group.ranks[-1].end == "done" and group.ranks[0].end == "waiting"
    what = f"save() or load() by {group.world - 1} of {group.world} ranks did not return"
    require(not is_waiting, what, "group")


# --- step 8 -------------------------------------------------------------------------------


@LAB.step(
    8, "a model that is too large for one rank",
    "the parameters of build_model, bit for bit, and a shard of them in memory",
    "build_sharded",
    crashes={"copy out of meta tensor": "meta_copy", "meta tensor": "on_meta"},
)  # fmt: skip
def meta(submission, reference, lesson):
    n, true = lesson.world, reference.build_model()
    with reference.Memory(torch.device("cpu")) as memory:
        model, adam = submission.build_sharded(torch.device("cpu"))
    layer = 4 * 4 * reference.HIDDEN * (reference.HIDDEN + 1)
    limit = 4 * sum(p.numel() for p in true.parameters()) // n + 4 * layer
    what = f"up to {memory.peak:,} bytes were in use, and {limit:,} are enough"
    lesson.fact("scores", {"peak bytes": memory.peak})
    expect(lesson, n == 1 or memory.peak <= limit, what, "built_whole")
    yield "the whole model was never in memory"
    updated = {id(p) for group in adam.param_groups for p in group["params"]}
    right = updated == {id(p) for p in model.parameters()}
    require(right, "the optimizer does not update the parameters of the model", "meta_adam")
    named = [(name, p.to_local().detach()) for name, p in model.named_parameters()]
    for name, mine in named:
        what = f"{name} is still on the meta device"
        expect(lesson, not mine.is_meta, what, "on_meta")
    weight = named[0][1]
    shards = [torch.zeros_like(weight) for _ in range(n)]
    dist.all_gather(shards, weight)
    are_equal = n > 1 and weight.std() > 0 and torch.equal(shards[0], shards[1])
    wrong = hint = ""
    for (name, mine), whole in zip(named, true.parameters(), strict=True):
        chunks = whole.detach().chunk(n)
        if torch.equal(mine, chunks[lesson.rank]):
            continue
        wrong, hint = f"the values of {name} are not those of build_model", "not_written"
        if torch.equal(mine, chunks[0]):
            wrong, hint = f"the shard of {name} has the rows of rank 0", "first_rows"
        elif are_equal:
            wrong, hint = f"the shards of {name} are equal on all ranks", "drawn_as_shards"
        break
    expect(lesson, not wrong, wrong, hint)
