"""The steps of lab 03: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. The models here are small, of odd sizes
(so that shards need padding) and in float64. Where a number is wrong, it is compared with the
numbers that the common mistakes give, and the one that it equals names the hint.
"""

import contextlib
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
import torch.distributed.checkpoint  # as fully_shard below
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from graders.tools import Lab, Lesson, ask, same, verdict

HINTS = {
    "bytes": "In float32 a parameter takes 4 bytes, its gradient 4, and Adam's two moments "
    "8: return the three in this order.",
    "sharded": "Stage 1 shards the optimizer alone, stage 2 the gradients as well, stage 3 "
    "the parameters as well.",
    "round_up": "If N does not divide Ψ, the shards are padded to equal length: round a "
    "shard up, then multiply by its bytes.",
    "room": "The states are not all that a step needs: `room` bytes must be left below the "
    "limit.",
    "smallest": "Take the smallest stage that fits: the higher ones send more, or wait more "
    "often.",
    "none_fits": "Where even stage 3 does not fit, return None.",
    "layout_length": "The flat tensor holds all values and is padded with zeros to the next "
    "multiple of n, no further: only then do its n chunks have equal length.",
    "layout_values": "The flat tensor holds the values of all tensors, one behind the other, "
    "in their order.",
    "layout_views": "The second result must be views of the flat tensor, in the tensors' "
    "shapes: what is written to one is seen in the other.",
    "shard_memory": "self.shard is a copy, and is held in addition to the flat tensor. "
    "nn.Parameter(view) shares the memory of the view.",
    "shard_part": "Rank r updates the r-th of N parts of the flat tensor: "
    "self.flat.chunk(self.n)[dist.get_rank()].",
    "adam_whole": "Adam got more than the shard, and would keep moments for all of it: give "
    "it [self.shard] alone.",
    "mean": "A reduce-scatter adds up. The gradient of the whole batch is the mean: divide "
    "by N.",
    "not_reduced": "This is the gradient of this rank's own rows. The reduce-scatter must "
    "bring the sum over all ranks.",
    "wrong_part": "This is the gradient of another rank's part. Chunk r of the input of a "
    "reduce-scatter goes to rank r.",
    "not_passed_round": "Parameters outside of this rank's shard are old: after Adam, "
    "all-gather the parts into the flat tensor.",
    "not_freed": "Whole gradients are left after backward. With the unit's last one, set "
    "parameter.grad of all its parameters to None.",
    "each_parameter": "The reduce-scatter was called for every parameter. Count the unit's "
    "gradients, and send all of them at once with the last.",
    "restart": "The second backward was not reduced: self.missing must start again when it "
    "has come to 0.",
    "late": "Backward ended and the gradients had not been reduced: that belongs into "
    "ready(), not into step().",
    "shard_gradient_kept": "After the step the shards' gradients are still there: set them "
    "to None, as adam.zero_grad() does.",
    "storage": "gather must give the storage self.whole.nbytes bytes before the all-gather "
    "fills it.",
    "gathered": "After gather(), `whole` must hold the shards of all ranks, in the order of "
    "ranks.",
    "free": "free() must resize the storage of `whole` to 0: to drop a reference frees "
    "nothing, for autograd and the views have others.",
    "before_forward": "The parameters must be whole before the unit computes: gather in "
    "before_forward.",
    "after_forward": "After its forward the unit is still whole. Free it: its turn comes "
    "again only in backward.",
    "backward_gather": "Backward needs the parameters again: let output.register_hook gather "
    "them when the gradient of the output is known.",
    "hook_returns": "What a tensor's hook returns replaces the gradient: return nothing.",
    "backward_free": "After its backward the unit is still whole: free it in reduce_gradient.",
    "whole_gradient_kept": "whole.grad is still there: 4Ψ bytes, as without ZeRO. Set it to "
    "None; only self.shard.grad is kept.",
    "not_wrapped": "The model is not sharded: fully_shard(module) changes a module in place.",
    "root_alone": "A unit is not wrapped by itself. Wrapped with the root, all parameters "
    "are gathered in one piece: call fully_shard on each of model.units() first.",
    "no_root": "The root is not wrapped: the last call is fully_shard(model). It takes what "
    "no unit has, and connects the units for prefetching.",
    "too_fine": "Linear layers were wrapped by themselves: more messages, each with its "
    "latency. One unit for each of model.units().",
    "reshard": "Units stay whole after their forward (reshard_after_forward=False): that saves "
    "an all-gather, and costs 4Ψ bytes until backward is through.",
    "stale": "Adam's parameters are not those of the model. fully_shard replaces them by "
    "DTensors: make the optimizer afterwards.",
    "norm_local": "This is the norm of this rank's shard. All-reduce the sum of squares.",
    "norm_of_norms": "Norms cannot be added, squares can: all-reduce the sum of squares, and "
    "take the square root at the end.",
    "not_scaled": "The norm is right, and the gradients are not scaled in place by limit / "
    "norm.",
    "grows": "A gradient below the limit was changed. Scale by limit / norm only if that is "
    "below 1.",
    "loss_share": "The gradients of the micro-batches are added up. Divide each loss by the "
    "number of micro-batches.",
    "one_forward": "The rows did not go through in micro-batches: run forward and backward "
    "for each chunk, so that only its activations are alive.",
    "no_sync": "Some micro-batches did not reduce their gradients, which stay whole until "
    "then: 4Ψ bytes, too many for two ranks. Leave set_requires_gradient_sync alone.",
    "loss_returned": "Return the mean loss over all rows, detached: the sum of the "
    "micro-batches' shares.",
    "one_writer": "Every rank writes its own shards: all ranks call dcp.save, with the state "
    "of get_state_dict as it is. Gathered first, it would be whole on a rank.",
    "parameters_lost": "The loaded model has not the saved parameters. dcp.load fills the "
    "state you give it; set_state_dict brings that into the model.",
    "moments_lost": "The parameters were loaded and Adam's moments were not: save them, load "
    "them, and pass them to set_state_dict.",
    "step_lost": "load() must return the step that was saved: dcp.load replaces the number "
    "in the state, not in a variable that had its value before.",
    "group": "Ranks outside of the group were waited for: pass process_group=group to dcp.",
    "built_whole": "More was in use than a shard and a layer. Build the model on the meta "
    "device, shard it there, and only then allocate by to_empty.",
    "not_written": "The parameters have not the values of build_model. to_empty leaves them "
    "arbitrary: every shard must be written, biases too.",
    "first_rows": "Every rank has the first rows. my_rows(whole, parameter) gives the rows "
    "of this rank.",
    "drawn_as_shards": "Every rank drew numbers for its own rows. Draw the whole layer on "
    "each rank, from the same seed, and keep the rows.",
    "other": "The numbers fit no common mistake. Try one rank first, then two; print one "
    "tensor before and after, on every rank.",
}

LAB = Lab(HINTS)
DTYPE, TIGHT = torch.float64, (1e-6, 1e-10)
WIDTH, HIDDEN, BLOCKS = 3, 5, 2  # an odd number of parameters in the last unit: padded
ROWS = 12


def expect(lesson: Lesson, what: str, found: Any, hint: str = "other") -> None:
    """Raise `Wrong` unless this is "right" (or True) on every rank; another word says more.

    The ranks meet before, so that all of those on which it is wrong can say so.
    """
    found = {True: "right", False: "other"}.get(found, found)
    lesson.meet()
    ask(found == "right", f"{what} of rank {lesson.rank} is wrong ({found})", hint)


def random(*shape: int, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE)


def small(lab: ModuleType) -> nn.Module:
    torch.manual_seed(7)
    return lab.Net(WIDTH, HIDDEN, BLOCKS).double()


def rows(lesson: Lesson, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of all ranks, and of this one."""
    x = random(ROWS, WIDTH, seed=step)
    return x, x.chunk(lesson.world)[lesson.rank]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sin()).square().mean()


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of the mean loss over these rows."""
    return list(torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def whole_values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor() for parameter in model.parameters()]


def train_alone(lab: ModuleType, steps: int) -> nn.Module:
    """The model of one process, after so many steps."""
    model = small(lab)
    adam = lab.make_adam(list(model.parameters()))
    for step in range(steps):
        adam.zero_grad()
        loss_of(model, random(ROWS, WIDTH, seed=step)).backward()
        adam.step()
    return model


def flat_parts(tensors: Iterable[torch.Tensor], n: int) -> list[torch.Tensor]:
    """n equal parts of all values, padded."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return list(torch.cat([flat, flat.new_zeros(-len(flat) % n)]).chunk(n))


def by_unit(
    model: nn.Module, tensors: Iterable[torch.Tensor], n: int
) -> list[list[torch.Tensor]]:
    """For each unit n equal parts of what these tensors hold, one for each parameter."""
    left = iter(tensors)
    return [flat_parts([next(left) for _ in u.parameters()], n) for u in model.units()]


# --- step 1 -------------------------------------------------------------------------------

SIZES = ((1200, 4), (1001, 3), (7_000_000_001, 64))
CASES = (  # psi, n, limit, room, stage
    (1200, 4, 20_000, 0, 0),
    (1200, 4, 12_000, 0, 1),
    (1200, 4, 12_000, 1, 2),
    (1200, 4, 8_400, 1_000, 3),
    (1200, 4, 4_799, 0, None),
    (1200, 1, 19_000, 0, None),
)


@LAB.alone(
    1, "count before you cut", "the bytes of every stage, and the smallest that fits",
    "bytes_per_rank smallest_stage",
)  # fmt: skip
def count(theirs, ours, lesson):
    for psi, n in SIZES:
        for stage in range(4):
            found = [int(number) for number in theirs.bytes_per_rank(psi, n, stage)]
            true = list(ours.bytes_per_rank(psi, n, stage))
            what = f"Ψ = {psi:,}, N = {n}, stage {stage}: bytes {found}, and not {true}"
            pairs = zip(found, true, strict=False)
            close = len(found) == 3 and all(abs(a - b) <= 16 for a, b in pairs)
            hint = "round_up" if psi % n and close else "sharded"
            ask(found == true, what, hint if stage else "bytes")
    yield "the bytes of every stage"
    theirs.bytes_per_rank = ours.bytes_per_rank
    for psi, n, limit, room, stage in CASES:
        found = theirs.smallest_stage(psi, n, limit, room)
        what = f"Ψ = {psi:,}, N = {n}, limit {limit:,}, room {room:,}: stage {found}"
        hint = "none_fits"
        if stage is not None:
            hint = "room" if room and (found or 0) < stage else "smallest"
        ask(found == stage, f"{what}, not {stage}", hint)


# --- step 2 -------------------------------------------------------------------------------


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def layout(theirs: ModuleType, n: int) -> str:
    """What lay_out makes of 13 numbers in four tensors: "right", or what is not."""
    shapes = ((2, 3), (5,), (1, 1), (1,))
    tensors = [random(*shape, seed=seed) for seed, shape in enumerate(shapes, start=1)]
    flat, views = theirs.lay_out(tensors, n)
    true = torch.cat(flat_parts(tensors, n))
    if flat.shape != true.shape:
        return "length"
    if not same(flat, true, *TIGHT):
        return "values"
    shared = all(memory_of(view) == memory_of(flat) for view in views)
    return "right" if shared and same(list(views), tensors, *TIGHT) else "views"


def expect_part(lesson: Lesson, what: str, gradient: Any, parts: list, own: list) -> None:
    """Raise `Wrong` unless this is the rank's part of the mean gradient; `own`: of its rows."""
    n, rank = lesson.world, lesson.rank
    known = {"right": parts[rank], "sum": n * parts[rank], "own": own[rank]}
    known |= {f"part {r}": part for r, part in enumerate(parts) if r != rank}
    known |= {f"sum of part {r}": n * part for r, part in enumerate(parts) if r != rank}
    found = verdict(gradient, *TIGHT, **known)
    hints = {"sum": "mean", "own": "not_reduced", "none": "not_reduced", "other": "other"}
    expect(lesson, what, found, hints.get(found, "wrong_part"))


@LAB.step(
    2, "ZeRO-1, the optimizer in shards",
    "the parameters of one process, with moments of a shard", "lay_out ZeRO1",
)  # fmt: skip
def zero1(theirs, ours, lesson):
    n, rank = lesson.world, lesson.rank
    for count in (2, 3, 4):
        found = layout(theirs, count)
        expect(lesson, "lay_out", found, f"layout_{found}")
    yield "lay_out makes one flat tensor and views of it"

    theirs.lay_out = ours.lay_out
    model = small(ours)
    mine = flat_parts(model.parameters(), n)[rank]
    engine = theirs.ZeRO1(model)
    expect(lesson, "the shard", same(engine.shard, mine, *TIGHT), "shard_part")
    shared = memory_of(engine.shard) == memory_of(engine.flat)
    expect(lesson, "the shard", shared or "a copy", "shard_memory")
    held = [p for group in engine.adam.param_groups for p in group["params"]]
    alone = len(held) == 1 and held[0] is engine.shard
    expect(lesson, "what Adam got", alone, "adam_whole")
    yield "every rank has its shard, and Adam for it"

    seen: list[Any] = []
    engine.adam.register_step_pre_hook(lambda *_: seen.append(deepcopy(engine.shard.grad)))
    x, own = rows(lesson, 0)
    whole, local = (flat_parts(gradients(small(ours), part), n) for part in (x, own))
    with lesson.phase("a step"):
        loss_of(model, own).backward()
        engine.step()
    expect_part(lesson, "the shard's gradient", seen[0] if seen else None, whole, local)
    yield "Adam gets the mean gradient of the shard"
    found, true = (flat_parts(m.parameters(), n) for m in (model, train_alone(ours, 1)))
    good, mine = same(found, true, *TIGHT), same(found[rank], true[rank], *TIGHT)
    passed = good or not mine or "old outside of the shard"
    expect(lesson, "what the other ranks updated", passed, "not_passed_round")
    expect(lesson, "the model after a step", good)


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "ZeRO-2, gradients leave as they come",
    "the parameters of one process, with gradients and moments of a shard", "Bucket ZeRO2",
)  # fmt: skip
def zero2(theirs, ours, lesson):
    model = small(ours)
    engine, units = theirs.ZeRO2(model), len(model.units())
    for step in range(2):
        where, (x, own) = f"backward {step + 1}", rows(lesson, step)
        before, trained = train_alone(ours, step), train_alone(ours, step + 1)
        whole, local = (
            by_unit(before, gradients(before, part), lesson.world) for part in (x, own)
        )
        with lesson.phase(where):
            loss_of(model, own).backward()
        names = [call.name for call in lesson.calls if call.phase == where]
        count = sum(name.startswith("reduce_scatter") for name in names)
        found = [bucket.shard.grad for bucket in engine.buckets]
        lesson.meet()
        what = f"{where}: {count} reduce-scatters of rank {lesson.rank} for {units} units"
        ask(count <= units, what, "each_parameter")
        late = all(gradient is None for gradient in found)
        ask(count or step or not late, what, "late")
        ask(count == units or step == 0, what, "restart")
        for gradient, parts, mine in zip(found, whole, local, strict=True):
            expect_part(lesson, f"{where}: a shard's gradient", gradient, parts, mine)
        freed = all(parameter.grad is None for parameter in model.parameters())
        what = f"{where}: what is left of whole gradients"
        expect(lesson, what, freed or "left", "not_freed")
        yield f"{where}: shards of the gradients, and nothing whole"
        with lesson.phase("update"):
            engine.step()
        found, old, true = (list(each.parameters()) for each in (model, before, trained))
        partly = not same(found, old, *TIGHT) and "old"  # outside of the shards
        right = same(found, true, *TIGHT) or partly
        expect(lesson, f"the model after step {step + 1}", right, "not_passed_round")
        freed = all(bucket.shard.grad is None for bucket in engine.buckets)
        what = "what is left of the gradient after a step"
        expect(lesson, what, freed or "kept", "shard_gradient_kept")


# --- step 4 -------------------------------------------------------------------------------


@LAB.step(
    4, "ZeRO-3, parameters as guests",
    "the parameters of one process, with a shard of everything", "Unit ZeRO3",
)  # fmt: skip
def zero3(theirs, ours, lesson):
    n, rank = lesson.world, lesson.rank
    unit = theirs.Unit(small(ours).blocks[0])
    full = torch.cat(flat_parts(small(ours).blocks[0].parameters(), n))

    def size() -> int:
        return unit.whole.untyped_storage().nbytes()

    expect(lesson, "the storage of a unit at the beginning", size() == 0, "free")
    yield "free takes the memory away"
    with contextlib.suppress(RuntimeError):  # nothing to gather into: the size tells
        unit.gather()
    expect(lesson, "the storage after gather", size() == full.nbytes, "storage")
    expect(lesson, "`whole` after gather", same(unit.whole, full, *TIGHT), "gathered")
    yield "gather brings it back, filled"
    unit.whole.untyped_storage().resize_(0)
    with contextlib.suppress(RuntimeError):
        unit.before_forward(None, ())
    whole = size() > 0 and same(unit.whole, full, *TIGHT)
    expect(lesson, "`whole` in forward", whole, "before_forward")
    leaf = torch.ones(2, 3, dtype=DTYPE, requires_grad=True)
    output = leaf * 1
    unit.after_forward(None, (), output)
    expect(lesson, "the storage after forward", size() == 0, "after_forward")
    output.backward(torch.full_like(output, 3.0))
    expect(lesson, "the storage in backward", size() == full.nbytes, "backward_gather")
    kept = same(leaf.grad, torch.full_like(leaf, 3.0), *TIGHT)
    expect(lesson, "the gradient behind the hook", kept, "hook_returns")
    yield "units are whole in forward and in backward, and not between"
    everybody = [random(len(full), seed=20 + r) for r in range(n)]
    mean, own = (sum(everybody) / n).chunk(n), everybody[rank].chunk(n)
    unit.whole.grad = everybody[rank].clone()
    unit.reduce_gradient(unit.whole)
    expect_part(lesson, "the shard's gradient", unit.shard.grad, mean, own)
    dropped = unit.whole.grad is None
    expect(lesson, "whole.grad after its reduction", dropped, "whole_gradient_kept")
    expect(lesson, "the storage after backward", size() == 0, "backward_free")
    model = small(ours)
    engine = theirs.ZeRO3(model)
    for step in range(2):
        with lesson.phase("a step"):
            loss_of(model, rows(lesson, step)[1]).backward()
            engine.step()
    true = train_alone(ours, 2)
    parts = [parts[rank] for parts in by_unit(true, true.parameters(), n)]
    good = same([unit.shard for unit in engine.units], parts, *TIGHT)
    expect(lesson, "the shards after two steps", good)


# --- step 5 -------------------------------------------------------------------------------


@LAB.step(
    5, "the same by fully_shard",
    "one unit for each of model.units(), freed after its forward, and Adam for the shards",
    "shard_model",
)  # fmt: skip
def fsdp2(theirs, ours, lesson):
    model, adam = theirs.shard_model(small(ours))
    units, root = model.units(), isinstance(model, FSDPModule)
    missing = sum(not isinstance(unit, FSDPModule) for unit in units)
    what = "neither the root nor all units are FSDPModules"
    ask(root or not missing, what, "not_wrapped")
    ask(not missing, f"{missing} of {len(units)} units are not wrapped", "root_alone")
    ask(root, "the model itself is no FSDPModule", "no_root")
    fine = any(isinstance(m, FSDPModule) for b in model.blocks for m in (b.up, b.down))
    ask(not fine, "layers within the blocks are FSDPModules", "too_fine")
    yield "the root and every unit are wrapped"
    held = {id(p) for group in adam.param_groups for p in group["params"]}
    right = held == {id(p) for p in model.parameters()}
    ask(right, "Adam holds other parameters than the model", "stale")
    loss = loss_of(model, rows(lesson, 0)[1])
    whole = sum(not isinstance(p, DTensor) for u in units[:-1] for p in u.parameters())
    ask(not whole, f"{whole} parameters are whole between forward and backward", "reshard")
    loss.backward()
    adam.step()
    found = whole_values(model)
    true = list(train_alone(ours, 1).parameters())
    expect(lesson, "the model after a step", same(found, true, *TIGHT))


# --- step 6 -------------------------------------------------------------------------------


@LAB.step(
    6, "one norm, several micro-batches",
    "the norm of the whole gradient, and the gradient of all rows", "clip_gradients accumulate",
)  # fmt: skip
def clip(theirs, ours, lesson):
    n, rank = lesson.world, lesson.rank
    shards = [[random(3, seed=10 * r), random(4, 2, seed=10 * r + 1)] for r in range(n)]
    norms = torch.stack([torch.cat([t.flatten() for t in part]).norm() for part in shards])
    norm, known = norms.square().sum().sqrt(), {"own": "norm_local", "sum": "norm_of_norms"}
    for where, factor, hint in (("above", 0.1, "not_scaled"), ("below", 2.0, "grows")):
        mine, limit = [t.clone() for t in shards[rank]], factor * norm.item()
        found = torch.as_tensor(theirs.clip_gradients(mine, limit), dtype=DTYPE).detach()
        found = verdict(found, *TIGHT, right=norm, own=norms[rank], sum=norms.sum())
        expect(lesson, "the norm", found, known.get(found, "other"))
        scale = min(1.0, limit / (norm.item() + 1e-6))
        good = same(mine, [scale * t for t in shards[rank]])
        expect(lesson, f"a gradient {where} the limit", good, hint)
    yield "clip_gradients finds one norm, and scales by it"

    theirs.clip_gradients = ours.clip_gradients
    model, _ = ours.shard_model(small(ours))
    x, own = rows(lesson, 0)
    forwards, syncs, real = [], [], model.set_requires_gradient_sync
    model.register_forward_pre_hook(lambda *_: forwards.append(1))

    def sync(value: bool, **kwargs: Any) -> None:
        syncs.append(bool(value))
        real(value, **kwargs)

    model.set_requires_gradient_sync = sync
    loss = theirs.accumulate(model, own, own.sin(), 2)
    lesson.meet()
    what = f"2 micro-batches, and rank {rank} ran {len(forwards)} forwards"
    ask(len(forwards) == 2, what, "one_forward")
    expect(lesson, "the communication", all(syncs) or "left out", "no_sync")
    grads, found = [p.grad for p in model.parameters()], "none"
    if all(grad is not None for grad in grads):
        whole = torch.cat([grad.full_tensor().flatten() for grad in grads])
        true = torch.cat([grad.flatten() for grad in gradients(small(ours), x)])
        found = verdict(whole, *TIGHT, right=true, sum=2 * true)
    hint = "loss_share" if found == "sum" else "other"
    expect(lesson, "the accumulated gradient", found, hint)
    yield "accumulate leaves the gradient of all rows"
    found = "not detached"
    if isinstance(loss, torch.Tensor) and not loss.requires_grad:
        found = verdict(loss, *TIGHT, right=loss_of(small(ours), own).detach())
    expect(lesson, "the loss that accumulate returns", found, "loss_returned")


# --- step 7 -------------------------------------------------------------------------------


@LAB.step(
    7, "a checkpoint for any number of ranks",
    "what was saved, bit for bit, on as many ranks and on fewer", "save load", symmetric=False,
)  # fmt: skip
def checkpoint(theirs, ours, lesson):
    model, adam = ours.shard_model(small(ours))
    loss_of(model, rows(lesson, 0)[1]).backward()
    adam.step()
    adam.zero_grad()
    values, saved = whole_values(model), ours.every_bit(model, adam)
    folder = Path("checkpoint")  # in a folder of this group, which the runner removes
    whole: list[bool] = []
    real = torch.distributed.checkpoint.save

    def look(state: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.dim()]
        whole.extend(not isinstance(tensor, DTensor) for tensor in tensors)
        return real(state, *args, **kwargs)

    with mock.patch.object(torch.distributed.checkpoint, "save", look):
        theirs.save(model, adam, 41, folder)
    lesson.meet()
    files = len(list(folder.glob("*.distcp")))
    ask(files == lesson.world, f"{files} files for {lesson.world} ranks", "one_writer")
    what = "save() gathered the states: they are no DTensors any more"
    ask(not any(whole), what, "one_writer")
    for n in sorted({lesson.world, max(lesson.world - 1, 1)}, reverse=True):
        mesh = DeviceMesh("cpu", list(range(n)))
        if lesson.rank >= n:
            break
        other = small(ours)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(7.0)
        for part in [*other.units(), other]:
            ours.fully_shard(part, mesh=mesh)
        other_adam = ours.make_adam(list(other.parameters()))
        step = theirs.load(other, other_adam, folder, mesh.get_group())
        bits = ours.every_bit(other, other_adam)
        what = f"loaded by {n} of {lesson.world} ranks, "
        right = all(map(torch.equal, whole_values(other), values))
        ask(right, f"{what}parameters: no", "parameters_lost")
        right = len(bits) == len(saved) and all(map(torch.equal, bits, saved))
        ask(right, f"{what}moments: no", "moments_lost")
        ask(step == 41, f"{what}step: {step} in place of 41", "step_lost")
        yield f"saved by {lesson.world}, loaded by {n}: equal bit for bit"


@checkpoint.stuck
def _(group):
    """A load by fewer ranks that waits for the rest."""
    waits = group.ranks[-1].end == "done" and group.ranks[0].end == "waiting"
    what = f"load by {group.world - 1} of {group.world} ranks did not end"
    ask(not waits, what, "group")


# --- step 8 -------------------------------------------------------------------------------


@LAB.step(
    8, "a model that nobody could build",
    "the parameters of build_model, bit for bit, and a shard of them in memory",
    "build_sharded",
)  # fmt: skip
def meta(theirs, ours, lesson):
    n, rank, true = lesson.world, lesson.rank, ours.build_model()
    with ours.Memory(torch.device("cpu")) as memory:
        model, _ = theirs.build_sharded(torch.device("cpu"))
    layer = 4 * 4 * ours.HIDDEN * (ours.HIDDEN + 1)
    bound = 4 * sum(p.numel() for p in true.parameters()) // n + 2 * layer
    what = f"rank {rank} had {memory.peak:,} bytes in use, {bound:,} are enough"
    lesson.fact("scores", {"peak bytes": memory.peak})
    lesson.meet()
    ask(n == 1 or memory.peak <= bound, what, "built_whole")
    yield "nothing was whole at any time"
    weight = model.first.weight.to_local().detach()
    shards = [torch.zeros_like(weight) for _ in range(n)]
    if not weight.is_meta:
        dist.all_gather(shards, weight)
    alike = n > 1 and weight.std() > 0 and torch.equal(shards[0], shards[1])
    found = "right"
    for parameter, whole in zip(model.parameters(), true.parameters(), strict=True):
        mine, chunks = parameter.to_local().detach(), whole.detach().chunk(n)
        if mine.is_meta:
            found = "on the meta device"
        elif not torch.equal(mine, chunks[rank]):
            found = "the same on all ranks" if alike else "other"
            found = "first rows" if torch.equal(mine, chunks[0]) else found
        if found != "right":
            break
    known = {"first rows": "first_rows", "the same on all ranks": "drawn_as_shards"}
    expect(lesson, "the content of the shards", found, known.get(found, "not_written"))
