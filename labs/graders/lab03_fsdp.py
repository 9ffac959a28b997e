"""The steps of lab 03: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. The models here are small, of odd sizes
(so that shards need padding) and in float64. Where a number is wrong, it is compared with the
numbers that the common mistakes give, and the one that it equals names the hint.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
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

from graders.runner import Group, Lesson, Step, Wrong

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

DTYPE = torch.float64
WIDTH, HIDDEN, BLOCKS = 3, 5, 2  # an odd number of parameters in the last unit: padded
ROWS = 12


@functools.lru_cache
def finished() -> ModuleType:
    """The lab with its solutions."""
    path = Path(__file__).parent.parent / "lab03_fsdp.py"
    spec = importlib.util.spec_from_file_location("finished_lab03", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def keep_only(lesson: Lesson, *own: str) -> tuple[ModuleType, ModuleType]:
    """Take all but these names from the finished lab; return the learner's lab and that."""
    lab = finished()
    for name, value in vars(lab).items():
        ours = getattr(value, "__module__", None) == lab.__name__ or name.isupper()
        if ours and name not in own:
            setattr(lesson.module, name, value)
    return lesson.module, lab


def same(a: Any, b: Any) -> bool:
    """Whether two tensors have one shape and agree but for rounding."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return torch.allclose(a.detach().double(), b.detach().double(), rtol=1e-6, atol=1e-10)


def verdict(ours: Any, **candidates: torch.Tensor) -> str:
    """The name of the first candidate that `ours` equals; "none" or "other"."""
    if ours is None:
        return "none"
    for name, candidate in candidates.items():
        if same(ours, candidate):
            return name
    return "other"


def expect(
    group: Group, fact: str, what: str, hints: dict[str, str], other: str = "other"
) -> None:
    """Raise `Wrong` unless every rank reports "right" for this fact."""
    for rank, found in enumerate(group.facts(fact)):
        if found != "right":
            found = found or "not reported"
            raise Wrong(
                f"{what} of rank {rank} is wrong ({found})", HINTS[hints.get(str(found), other)]
            )


def on_all(good: bool) -> bool:
    """Whether something holds on all ranks."""
    everybody: list[bool | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, good)
    return all(everybody)


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


def train_alone(lab: ModuleType, steps: int) -> list[torch.Tensor]:
    """The parameters of one process, after so many steps."""
    model = small(lab)
    adam = lab.make_adam(list(model.parameters()))
    for step in range(steps):
        adam.zero_grad()
        loss_of(model, random(ROWS, WIDTH, seed=step)).backward()
        adam.step()
    return [parameter.detach() for parameter in model.parameters()]


def flat_parts(tensors: list[torch.Tensor], n: int) -> list[torch.Tensor]:
    """n equal parts of all values, padded."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return list(torch.cat([flat, flat.new_zeros(-len(flat) % n)]).chunk(n))


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


def probe_count(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "bytes_per_rank", "smallest_stage")
    for psi, n in SIZES:
        found = [[int(x) for x in module.bytes_per_rank(psi, n, stage)] for stage in range(4)]
        lesson.fact(f"bytes {psi} {n}", found)
    module.bytes_per_rank = lab.bytes_per_rank
    lesson.fact("stages", [module.smallest_stage(*case[:4]) for case in CASES])


def judge_count(group: Group, right: Callable[[str], None]) -> None:
    def truth(psi: int, n: int, stage: int) -> list[int]:
        return list(finished().bytes_per_rank(psi, n, stage))

    for psi, n in SIZES:
        for stage, found in enumerate(group.facts(f"bytes {psi} {n}")[0]):
            true = truth(psi, n, stage)
            what = f"Ψ = {psi:,}, N = {n}, stage {stage}: bytes {found}, and not {true}"
            if found == true:
                continue
            if stage == 0:
                raise Wrong(what, HINTS["bytes"])
            near = len(found) == 3 and all(
                abs(a - b) <= 16 for a, b in zip(found, true, strict=True)
            )
            if psi % n and near:
                raise Wrong(what, HINTS["round_up"])
            raise Wrong(what, HINTS["sharded"])
    right("the bytes of every stage")
    for (psi, n, limit, room, stage), found in zip(
        CASES, group.facts("stages")[0], strict=True
    ):
        what = (
            f"Ψ = {psi:,}, N = {n}, limit {limit:,}, room {room:,}: stage {found}, not {stage}"
        )
        if found == stage:
            continue
        if stage is None:
            raise Wrong(what, HINTS["none_fits"])
        raise Wrong(what, HINTS["room" if room and (found or 0) < stage else "smallest"])


# --- step 2 -------------------------------------------------------------------------------


def spy_on_adam(engine: Any, seen: dict[str, Any]) -> None:
    """Note the gradients that Adam works with, at its first step."""
    real = engine.adam.step

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in engine.adam.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                seen.setdefault(id(parameter), grad if grad is None else grad.clone())
        return real(*args, **kwargs)

    engine.adam.step = step


def probe_zero1(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "lay_out", "ZeRO1")
    n, rank = lesson.world, lesson.rank
    for count in (2, 3, 4):
        tensors = [random(2, 3, seed=1), random(5, seed=2), random(1, 1, seed=4)]  # 12 numbers
        tensors = [*tensors, random(1, seed=5)]  # 13
        flat, views = module.lay_out(tensors, count)
        true = torch.cat([t.flatten() for t in tensors])
        if flat.shape != (-(-13 // count) * count,):
            lesson.fact("layout", "length")
            return
        values = torch.cat([flat[:13], flat[13:] + 0])
        good = same(values[:13], true) and not flat[13:].any()
        if not good:
            lesson.fact("layout", "values")
            return
        base = flat.untyped_storage().data_ptr()
        shared = len(views) == 4 and all(
            v.untyped_storage().data_ptr() == base and same(v, t)
            for v, t in zip(views, tensors, strict=True)
        )
        if not shared:
            lesson.fact("layout", "views")
            return
    lesson.fact("layout", "right")

    module.lay_out = lab.lay_out
    model = small(lab)
    mine = flat_parts([p.detach() for p in model.parameters()], n)
    engine = module.ZeRO1(model)
    seen: dict[int, Any] = {}
    spy_on_adam(engine, seen)
    lesson.fact("part", verdict(engine.shard, right=mine[rank]))
    base = engine.flat.untyped_storage().data_ptr()
    good = engine.shard.untyped_storage().data_ptr() == base
    lesson.fact("memory", "right" if good else "a copy")
    held = [p for group in engine.adam.param_groups for p in group["params"]]
    lesson.fact("adam", "right" if len(held) == 1 and held[0] is engine.shard else "other")
    x, own = rows(lesson, 0)
    parts = flat_parts(gradients(small(lab), x), n)
    locals_ = flat_parts(gradients(small(lab), own), n)
    loss_of(model, own).backward()
    engine.step()
    grad = seen.get(id(engine.shard))
    lesson.fact("gradient", gradient_verdict(grad, parts, locals_, lesson))
    compare_parameters(lesson, lab, engine, model, 1)


def gradient_verdict(grad: Any, parts: list, own: list, lesson: Lesson) -> str:
    n, rank = lesson.world, lesson.rank
    others = {f"part {r}": parts[r] for r in range(n) if r != rank}
    others |= {f"sum of part {r}": n * parts[r] for r in range(n) if r != rank}
    return verdict(grad, right=parts[rank], sum=n * parts[rank], own=own[rank], **others)


def compare_parameters(
    lesson: Lesson, lab: ModuleType, engine: Any, model: nn.Module, done: int
) -> None:
    """Train up to two steps; report whether the parameters are those of one process."""
    ours = flat_parts([p.detach().clone() for p in model.parameters()], lesson.world)
    true = flat_parts(train_alone(lab, done), lesson.world)
    mine = same(ours[lesson.rank], true[lesson.rank])
    whole = all(map(same, ours, true))
    lesson.fact("passed round", "right" if whole or not mine else "old outside of the shard")
    lesson.fact("parameters", "right" if whole else "other")


PART_HINTS = {"sum": "mean", "own": "not_reduced", "none": "not_reduced"}
PART_HINTS |= {f"{kind}part {r}": "wrong_part" for kind in ("", "sum of ") for r in range(4)}


def judge_zero1(group: Group, right: Callable[[str], None]) -> None:
    known = {name: f"layout_{name}" for name in ("length", "values", "views")}
    expect(group, "layout", "lay_out", known)
    right("lay_out makes one flat tensor and views of it")
    expect(group, "part", "the shard", {}, "shard_part")
    expect(group, "memory", "the shard", {}, "shard_memory")
    expect(group, "adam", "what Adam got", {}, "adam_whole")
    right("every rank has its shard, and Adam for it")
    expect(group, "gradient", "the shard's gradient", PART_HINTS)
    right("Adam gets the mean gradient of the shard")
    expect(group, "passed round", "what the other ranks updated", {}, "not_passed_round")
    expect(group, "parameters", "the model after a step", {})


# --- step 3 -------------------------------------------------------------------------------


def count_calls(lesson: Lesson) -> dict[str, int]:
    """Count calls of reduce_scatter from here on."""
    counts = {"reduce_scatter": 0}
    for name in ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            real = getattr(dist, name)

            def counting(*args: Any, real: Callable = real, **kwargs: Any) -> Any:
                counts["reduce_scatter"] += 1
                return real(*args, **kwargs)

            setattr(dist, name, counting)
    return counts


def probe_zero2(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "Bucket", "ZeRO2")
    model, n = small(lab), lesson.world
    counts = count_calls(lesson)
    engine = module.ZeRO2(model)
    units = small(lab).units()
    for step in range(2):
        x, own = rows(lesson, step)
        reference, trained = small(lab), train_alone(lab, step)
        with torch.no_grad():
            for parameter, true in zip(reference.parameters(), trained, strict=True):
                parameter.copy_(true)
        whole, local = [], []
        for target, rows_ in ((whole, x), (local, own)):
            found = iter(gradients(reference, rows_))
            for unit in units:
                target.append(flat_parts([next(found) for _ in unit.parameters()], n))
        before = counts["reduce_scatter"]
        loss_of(model, own).backward()
        lesson.fact(f"count {step}", counts["reduce_scatter"] - before)
        seen = [
            gradient_verdict(bucket.shard.grad, parts, mine, lesson)
            for bucket, parts, mine in zip(engine.buckets, whole, local, strict=True)
        ]
        lesson.fact(f"gradient {step}", next((s for s in seen if s != "right"), "right"))
        left = [p for p in model.parameters() if p.grad is not None]
        lesson.fact(f"freed {step}", "right" if not left else "left")
        if not on_all(not left and all(s == "right" for s in seen)):
            return
        engine.step()
        kept = [bucket for bucket in engine.buckets if bucket.shard.grad is not None]
        lesson.fact(f"zeroed {step}", "right" if not kept else "kept")
        found = [p.detach() for p in model.parameters()]
        true = train_alone(lab, step + 1)
        good = all(map(same, found, true))
        moved = not all(map(same, found, train_alone(lab, step)))
        lesson.fact(f"parameters {step}", "right" if good else "old" if moved else "other")
        if not on_all(good):
            return


def judge_zero2(group: Group, right: Callable[[str], None]) -> None:
    units = BLOCKS + 2
    for step in range(2):
        counts, where = group.facts(f"count {step}"), f"backward {step + 1}"
        for rank, count in enumerate(counts):
            what = f"{where}: {count} reduce-scatters of rank {rank} for {units} units"
            if count > units:
                raise Wrong(what, HINTS["each_parameter"])
            if count == 0 and step == 0 and group.facts("gradient 0")[rank] == "none":
                raise Wrong(what, HINTS["late"])
            if count < units and step == 1:
                raise Wrong(what, HINTS["restart"])
        expect(group, f"gradient {step}", f"{where}: a shard's gradient", PART_HINTS)
        expect(
            group, f"freed {step}", f"{where}: what is left of whole gradients", {}, "not_freed"
        )
        right(f"{where}: shards of the gradients, and nothing whole")
        what = f"the model after step {step + 1}"
        expect(group, f"parameters {step}", what, {}, "not_passed_round")
        expect(
            group,
            f"zeroed {step}",
            "what is left of the gradient after a step",
            {},
            "shard_gradient_kept",
        )


# --- step 4 -------------------------------------------------------------------------------


def probe_zero3(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "Unit", "ZeRO3")
    n, rank = lesson.world, lesson.rank
    source = small(lab).blocks[0]
    unit = module.Unit(small(lab).blocks[0])
    parts = flat_parts([p.detach() for p in source.parameters()], n)
    full = torch.cat(parts)

    def size() -> int:
        return unit.whole.untyped_storage().nbytes()

    def check(name: str, good: bool) -> bool:
        lesson.fact(name, "right" if good else "other")
        return on_all(good)

    if not check("free", size() == 0):
        return
    with contextlib.suppress(RuntimeError):  # nothing to gather into: the size tells
        unit.gather()
    if not check("storage", size() == full.nbytes):
        return
    if not check("gathered", same(unit.whole, full)):
        return
    unit.whole.untyped_storage().resize_(0)
    with contextlib.suppress(RuntimeError):
        unit.before_forward(None, ())
    if not check("before", size() and same(unit.whole, full)):
        return
    leaf = torch.ones(2, 3, dtype=DTYPE, requires_grad=True)
    output = leaf * 1
    unit.after_forward(None, (), output)
    if not check("after", size() == 0):
        return
    output.backward(torch.full_like(output, 3.0))
    if not check("backward", size() == full.nbytes):
        return
    if not check("hook", same(leaf.grad, torch.full_like(leaf, 3.0))):
        return
    x = random(len(full) + 0, seed=20 + rank)
    everybody = [random(len(full), seed=20 + r) for r in range(n)]
    mean, own = (sum(everybody) / n).chunk(n), x.chunk(n)
    unit.whole.grad = x.clone()
    unit.reduce_gradient(unit.whole)
    seen = gradient_verdict(unit.shard.grad, list(mean), list(own), lesson)
    lesson.fact("gradient", seen)
    if not on_all(seen == "right"):
        return
    if not check("dropped", unit.whole.grad is None):
        return
    if not check("freed", size() == 0):
        return
    model = small(lab)
    engine = module.ZeRO3(model)
    for step in range(2):
        loss_of(model, rows(lesson, step)[1]).backward()
        engine.step()
    true, place, good = train_alone(lab, 2), 0, True
    for part, unit_ in zip(engine.units, small(lab).units(), strict=True):
        count = len(list(unit_.parameters()))
        good &= same(part.shard, flat_parts(true[place : place + count], n)[rank])
        place += count
    check("trained", good)


def judge_zero3(group: Group, right: Callable[[str], None]) -> None:
    expect(group, "free", "the storage of a unit at the beginning", {}, "free")
    right("free takes the memory away")
    expect(group, "storage", "the storage after gather", {}, "storage")
    expect(group, "gathered", "`whole` after gather", {}, "gathered")
    right("gather brings it back, filled")
    expect(group, "before", "`whole` in forward", {}, "before_forward")
    expect(group, "after", "the storage after forward", {}, "after_forward")
    expect(group, "backward", "the storage in backward", {}, "backward_gather")
    expect(group, "hook", "the gradient behind the hook", {}, "hook_returns")
    right("units are whole in forward and in backward, and not between")
    expect(group, "gradient", "the shard's gradient", PART_HINTS)
    expect(group, "dropped", "whole.grad after its reduction", {}, "whole_gradient_kept")
    expect(group, "freed", "the storage after backward", {}, "backward_free")
    expect(group, "trained", "the shards after two steps", {})


# --- step 5 -------------------------------------------------------------------------------


def whole_now(model: nn.Module) -> int:
    return sum(not isinstance(p, DTensor) for p in model.parameters())


def probe_fsdp2(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "shard_model")
    given = small(lab)
    model, adam = module.shard_model(given)
    wrapped = [isinstance(unit, FSDPModule) for unit in model.units()]
    lesson.fact("root", isinstance(model, FSDPModule))
    lesson.fact("units", wrapped)
    fine = [isinstance(m, FSDPModule) for b in model.blocks for m in (b.up, b.down)]
    lesson.fact("fine", any(fine))
    ours = {id(p) for p in model.parameters()}
    theirs = {id(p) for group in adam.param_groups for p in group["params"]}
    lesson.fact("stale", ours != theirs)
    if not (isinstance(model, FSDPModule) and all(wrapped)):
        return
    loss = loss_of(model, rows(lesson, 0)[1])
    lesson.fact("whole", sum(whole_now(unit) for unit in model.units()[:-1]))
    loss.backward()
    adam.step()
    true = train_alone(lab, 1)
    found = [p.full_tensor() for p in model.parameters()]
    lesson.fact("trained", "right" if all(map(same, found, true)) else "other")


def judge_fsdp2(group: Group, right: Callable[[str], None]) -> None:
    root, units = group.facts("root")[0], group.facts("units")[0]
    missing = units.count(False)
    if not root and missing:
        raise Wrong("neither the root nor all units are FSDPModules", HINTS["not_wrapped"])
    if missing:
        raise Wrong(f"{missing} of {len(units)} units are not wrapped", HINTS["root_alone"])
    if not root:
        raise Wrong("the model itself is no FSDPModule", HINTS["no_root"])
    if group.facts("fine")[0]:
        raise Wrong("layers within the blocks are FSDPModules", HINTS["too_fine"])
    right("the root and every unit are wrapped")
    if group.facts("stale")[0]:
        raise Wrong("Adam holds other parameters than the model", HINTS["stale"])
    if count := group.facts("whole")[0]:
        raise Wrong(
            f"{count} parameters are whole between forward and backward", HINTS["reshard"]
        )
    expect(group, "trained", "the model after a step", {})


# --- step 6 -------------------------------------------------------------------------------


def probe_clip(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "clip_gradients", "accumulate")
    n = lesson.world
    shards = [[random(3, seed=10 * r), random(4, 2, seed=10 * r + 1)] for r in range(n)]
    mine = shards[lesson.rank]
    norms = [torch.cat([t.flatten() for t in part]).norm() for part in shards]
    norm = torch.stack(norms).square().sum().sqrt()
    for name, factor in (("long", 0.1), ("short", 2.0)):
        ours = [t.clone() for t in mine]
        limit = factor * norm.item()
        found = module.clip_gradients(ours, limit)
        found = torch.as_tensor(found, dtype=DTYPE).detach()
        own = norms[lesson.rank]
        seen = verdict(found, right=norm, own=own, sum=torch.stack(norms).sum())
        lesson.fact(f"{name} norm", seen)
        scale = min(1.0, limit / (norm.item() + 1e-6))
        good = all(
            torch.allclose(a, scale * b, rtol=1e-4) for a, b in zip(ours, mine, strict=True)
        )
        lesson.fact(f"{name} scaled", "right" if good else "other")

    module.clip_gradients = lab.clip_gradients
    model, _ = lab.shard_model(small(lab))
    x, own = rows(lesson, 0)
    calls = {"forward": 0}

    def count(*_: Any) -> None:
        calls["forward"] += 1

    model.register_forward_pre_hook(count)
    syncs: list[bool] = []
    real = model.set_requires_gradient_sync

    def sync(value: bool, **kwargs: Any) -> None:
        syncs.append(bool(value))
        real(value, **kwargs)

    model.set_requires_gradient_sync = sync
    loss = module.accumulate(model, own, own.sin(), 2)
    lesson.fact("forwards", calls["forward"])
    lesson.fact("sync", "right" if all(syncs) else "left out")
    local_loss = loss_of(small(lab), own).detach()
    found = loss.detach() if isinstance(loss, torch.Tensor) else loss
    detached = isinstance(loss, torch.Tensor) and not loss.requires_grad
    lesson.fact("loss", verdict(found, right=local_loss) if detached else "not detached")
    grads = [p.grad for p in model.parameters()]
    if not on_all(all(g is not None for g in grads)):
        lesson.fact("gradient", "none")
        return
    whole = torch.cat([g.full_tensor().flatten() for g in grads])
    true = torch.cat([g.flatten() for g in gradients(small(lab), x)])
    lesson.fact("gradient", verdict(whole, right=true, sum=2 * true))


def judge_clip(group: Group, right: Callable[[str], None]) -> None:
    known = {"own": "norm_local", "sum": "norm_of_norms"}
    expect(group, "long norm", "the norm", known)
    expect(group, "long scaled", "a gradient above the limit", {}, "not_scaled")
    expect(group, "short norm", "the norm", known)
    expect(group, "short scaled", "a gradient below the limit", {}, "grows")
    right("clip_gradients finds one norm, and scales by it")
    for rank, count in enumerate(group.facts("forwards")):
        if count != 2:
            what = f"2 micro-batches, and rank {rank} ran {count} forwards"
            raise Wrong(what, HINTS["one_forward"])
    expect(group, "sync", "the communication", {}, "no_sync")
    expect(group, "gradient", "the accumulated gradient", {"sum": "loss_share"})
    right("accumulate leaves the gradient of all rows")
    expect(group, "loss", "the loss that accumulate returns", {}, "loss_returned")


# --- step 7 -------------------------------------------------------------------------------


def probe_checkpoint(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "save", "load")
    model, adam = lab.shard_model(small(lab))
    loss_of(model, rows(lesson, 0)[1]).backward()
    adam.step()
    adam.zero_grad()
    saved = lab.every_bit(model, adam)
    count = len(list(model.parameters()))
    folder = Path("checkpoint")  # in a folder of this group, which the runner removes
    whole: list[bool] = []
    real = torch.distributed.checkpoint.save

    def look(state: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.dim()]
        whole.extend(not isinstance(tensor, DTensor) for tensor in tensors)
        return real(state, *args, **kwargs)

    with mock.patch.object(torch.distributed.checkpoint, "save", look):
        module.save(model, adam, 41, folder)
    lesson.fact("whole", any(whole))
    dist.barrier()
    files = len(list(folder.glob("*.distcp")))
    lesson.fact("files", files)
    if files != lesson.world:
        return
    for n in sorted({lesson.world, max(lesson.world - 1, 1)}, reverse=True):
        mesh = DeviceMesh("cpu", list(range(n)))
        if lesson.rank >= n:
            break
        other = small(lab)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.fill_(7.0)
        for part in [*other.units(), other]:
            lab.fully_shard(part, mesh=mesh)
        other_adam = lab.make_adam(list(other.parameters()))
        with lesson.phase(f"load {n}"):
            step = module.load(other, other_adam, folder, mesh.get_group())
        bits = lab.every_bit(other, other_adam)
        each = len(saved) // count
        same_bits = len(bits) == len(saved) and all(map(torch.equal, bits, saved))
        ours = [p.full_tensor() for p in other.parameters()]
        true = saved[::each]
        lesson.fact(f"parameters {n}", "right" if all(map(torch.equal, ours, true)) else "no")
        lesson.fact(f"moments {n}", "right" if same_bits else "no")
        lesson.fact(f"step {n}", "right" if step == 41 else f"{step} in place of 41")
    lesson.fact("end", True)


def judge_checkpoint(group: Group, right: Callable[[str], None]) -> None:
    files = group.facts("files")[0]
    if files != group.world:
        raise Wrong(f"{files} files for {group.world} ranks", HINTS["one_writer"])
    if any(group.facts("whole")):
        raise Wrong(
            "save() gathered the states: they are no DTensors any more", HINTS["one_writer"]
        )
    for n in sorted({group.world, max(group.world - 1, 1)}, reverse=True):
        for name, hint in (
            ("parameters", "parameters_lost"),
            ("moments", "moments_lost"),
            ("step", "step_lost"),
        ):
            found = group.facts(f"{name} {n}")[0]
            if found != "right":
                what = f"loaded by {n} of {group.world} ranks, {name}: {found}"
                raise Wrong(what, HINTS[hint])
        right(f"saved by {group.world}, loaded by {n}: equal bit for bit")


def stuck_in_checkpoint(group: Group) -> None:
    """A load by fewer ranks that waits for the rest."""
    if group.ranks[-1].facts.get("end") and not group.ranks[0].facts.get("end"):
        n = group.world - 1
        raise Wrong(f"load by {n} of {group.world} ranks did not end", HINTS["group"])


# --- step 8 -------------------------------------------------------------------------------


def probe_meta(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "build_sharded")
    true = lab.build_model()
    with lab.Memory(torch.device("cpu")) as memory:
        model, _ = module.build_sharded(torch.device("cpu"))
    layer = 4 * 4 * lab.HIDDEN * (lab.HIDDEN + 1)
    psi = sum(p.numel() for p in true.parameters())
    lesson.fact("peak", [memory.peak, 4 * psi // lesson.world + 2 * layer])
    weight = model.first.weight.to_local().detach()
    shards = [torch.zeros_like(weight) for _ in range(lesson.world)]
    if not weight.is_meta:
        dist.all_gather(shards, weight)
    alike = lesson.world > 1 and weight.std() > 0 and torch.equal(shards[0], shards[1])
    seen = "right"
    for ours, whole in zip(model.parameters(), true.parameters(), strict=True):
        mine, chunks = ours.to_local().detach(), whole.detach().chunk(lesson.world)
        if mine.is_meta:
            seen = "on the meta device"
        elif not torch.equal(mine, chunks[lesson.rank]):
            seen = "first rows" if torch.equal(mine, chunks[0]) else "other"
            if seen == "other" and alike:
                seen = "the same on all ranks"
        if seen != "right":
            break
    lesson.fact("values", seen)


def judge_meta(group: Group, right: Callable[[str], None]) -> None:
    if group.world > 1:
        for rank, (peak, bound) in enumerate(group.facts("peak")):
            if peak > bound:
                what = f"rank {rank} had {peak:,} bytes in use, {bound:,} are enough"
                raise Wrong(what, HINTS["built_whole"])
    right("nothing was whole at any time")
    known = {"first rows": "first_rows", "the same on all ranks": "drawn_as_shards"}
    expect(group, "values", "the content of the shards", known, "not_written")


# --- all of them --------------------------------------------------------------------------

STEPS = (
    Step(
        1,
        "count before you cut",
        "the bytes of every stage, and the smallest that fits",
        probe_count,
        judge_count,
        uses=("bytes_per_rank", "smallest_stage"),
        worlds=(1,),
    ),
    Step(
        2,
        "ZeRO-1, the optimizer in shards",
        "the parameters of one process, with moments of a shard",
        probe_zero1,
        judge_zero1,
        uses=("lay_out", "ZeRO1"),
    ),
    Step(
        3,
        "ZeRO-2, gradients leave as they come",
        "the parameters of one process, with gradients and moments of a shard",
        probe_zero2,
        judge_zero2,
        uses=("Bucket", "ZeRO2"),
    ),
    Step(
        4,
        "ZeRO-3, parameters as guests",
        "the parameters of one process, with a shard of everything",
        probe_zero3,
        judge_zero3,
        uses=("Unit", "ZeRO3"),
    ),
    Step(
        5,
        "the same by fully_shard",
        "one unit for each of model.units(), freed after its forward, and Adam for the shards",
        probe_fsdp2,
        judge_fsdp2,
        uses=("shard_model",),
    ),
    Step(
        6,
        "one norm, several micro-batches",
        "the norm of the whole gradient, and the gradient of all rows",
        probe_clip,
        judge_clip,
        uses=("clip_gradients", "accumulate"),
    ),
    Step(
        7,
        "a checkpoint for any number of ranks",
        "what was saved, bit for bit, on as many ranks and on fewer",
        probe_checkpoint,
        judge_checkpoint,
        uses=("save", "load"),
        symmetric=False,
        stuck=stuck_in_checkpoint,
    ),
    Step(
        8,
        "a model that nobody could build",
        "the parameters of build_model, bit for bit, and a shard of them in memory",
        probe_meta,
        judge_meta,
        uses=("build_sharded",),
    ),
)
