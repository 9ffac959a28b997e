"""The steps of the capstone: what each must do, how it is measured, the hint for each symptom.

Each of the first nine steps is graded on its own: all but the functions of that step is taken
from the finished program. The tenth takes the learner's whole file, and kills a rank of it. The
truth is a plain loop in one process, without a mesh, FSDP or DTensor.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.fx.experimental.symbolic_shapes  # backward(gradient) would, in every process
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graders.dsl import Lab, allclose, call_before, isclose, keep_only, require, show
from graders.protocol import Wrong
from graders.supervisor import Workspace
from worldsize.execution.processes import LINUX

LAB = Lab(isolate_steps=False)
FLAT = {
    "layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "pp": 1, "dp": 1,
    "tp": 1, "steps": 4, "batch": 8, "micro": 2, "text": "", "lr": 3e-3, "warmup": 2,
    "clip": 1.0, "precision": "fp32", "recompute": True, "compile": False, "seed": 0, "log": 0,
    "folder": "checkpoints", "every": 0, "keep": 2,
}  # fmt: skip
AXES, CPU = ["pp", "dp", "tp"], torch.device("cpu")
LAB.finished.text("")  # once here, not in every process


# --- the finished program, and the truth --------------------------------------------------


def free_sends() -> None:
    """Send unrecorded: pipelining asks for the functions of torch themselves."""
    dist.isend, dist.irecv = distributed_c10d.isend, distributed_c10d.irecv


def graft(submission: ModuleType, reference: ModuleType, *own: str) -> None:
    """Put these of the learner's functions into the finished program, the rest into theirs."""
    free_sends()
    keep_only(submission, reference, *own)
    for name in own:
        setattr(reference, name, getattr(submission, name))


def config_of(**changes: Any) -> Any:
    return LAB.finished.Config(**FLAT | changes)


def shape(mesh: dict[str, int]) -> str:
    return " × ".join(str(mesh.get(axis, 1)) for axis in AXES)


def plain(config: Any) -> nn.Module:
    """The whole model as one process has it: no DTensor, no hooks."""
    one = dataclasses.replace(config, pp=1, dp=1, tp=1)
    mesh = dict.fromkeys(AXES, SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1))
    with mock.patch.multiple(
        LAB.finished, shard=lambda module, *_: module, cut=lambda module, *_: module,
        layers_of_stage=lambda config, _: range(config.layers),
    ):  # fmt: skip
        return LAB.finished.build(one, mesh, CPU)


def meshed(config: Any) -> tuple[nn.Module, Any]:
    """What this rank has of the model, and the mesh."""
    mesh = LAB.finished.make_mesh(config, "cpu")
    return LAB.finished.build(config, mesh, CPU), mesh


def rows_of(config: Any, count: int = 1) -> list[torch.Tensor]:
    """The first global batches, by the rule that the text of the program states."""
    generator = torch.Generator().manual_seed(config.seed)
    text, batches = LAB.finished.text(config.text), []
    for _ in range(count):
        last = len(text) - config.sequence - 1
        places = torch.randint(last, (config.batch,), generator=generator)
        batches.append(text[places[:, None] + torch.arange(config.sequence + 1)])
    return batches


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return LAB.finished.loss_of(model(rows[:, :-1]), rows[:, 1:])


def truth(config: Any) -> list[list[float]]:
    """[loss, norm] of each step in one process."""
    model = plain(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    history = []
    for step, rows in enumerate(rows_of(config, config.steps), start=1):
        optimizer.param_groups[0]["lr"] = LAB.finished.rate(config, step)
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        history.append([loss.item(), norm.item()])
    return history


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ratio(reference: torch.Tensor, true: torch.Tensor) -> float:
    """By what our tensor is a multiple of the true one; nan if it is none."""
    if reference.shape != true.shape:
        return math.nan
    factor = ((reference * true).sum() / true.square().sum()).item()
    return (
        round(factor, 4) if torch.allclose(reference, factor * true, 1e-3, 1e-6) else math.nan
    )


def off(model: nn.Module, alone: nn.Module, rows: torch.Tensor) -> Iterator[tuple[str, float]]:
    """Those of this rank's parameters whose gradient is another multiple of the true one."""
    loss_of(alone, rows).backward()
    truths = dict(alone.named_parameters())
    ratios = {
        name: ratio(whole(p.grad), truths[name].grad) if p.grad is not None else 0.0
        for name, p in model.named_parameters()
    }
    return ((name, factor) for name, factor in ratios.items() if not isclose(factor, 1, 1e-3))


def returns(call: str, value: Any, fits: bool, wanted: str) -> None:
    """Raise `Wrong` unless a call has returned a value of the right kind."""
    found = "None" if value is None else f"a {type(value).__name__}"
    require(fits, f"{call} returns {found}, and should return {wanted}", "returned")


def gradient_of(name: str, factor: float) -> str:
    """What is wrong with a gradient, in words."""
    return f"the gradient of {name} is " + (
        "no multiple of the true one" if math.isnan(factor) else f"{factor} times the true one"
    )


# --- step 1: data -------------------------------------------------------------------------


@LAB.alone(1, "rows for every replica", "the replicas' rows are those of one process, batch "
           "after batch", "Stream")  # fmt: skip
def data(submission, reference, lesson):
    graft(submission, reference, "Stream")
    Path("letters.txt").write_bytes(bytes(range(256)) * 2)
    for dp, files in ((1, ""), (2, ""), (4, ""), (2, "letters.txt")):
        config = config_of(dp=dp, text=files)
        streams = [submission.Stream(config) for _ in range(dp)]
        before: list[torch.Tensor] = []
        for number, true in enumerate(rows_of(config, 2), start=1):
            where = f"dp = {dp}, batch {number}" + f", text = {files}" * bool(files)
            parts = [stream.next(r) for r, stream in enumerate(streams)]
            right = isinstance(parts[0], torch.Tensor)
            returns("Stream.next", parts[0], right, "a tensor of rows")
            shapes = {tuple(part.shape) for part in parts}
            found = ", ".join("×".join(map(str, shape)) for shape in shapes)
            right = shapes == {(config.batch // dp, config.sequence + 1)}
            require(right, f"{where}: the rows have the shape {found}", "rows_shape")
            rows = torch.cat(parts)
            hint = "rows_same" if dp > 1 and torch.equal(*parts[:2]) else "rows_other"
            hint = "rows_again" if before and torch.equal(rows, before[0]) else hint
            hint = "rows_text" if files and hint == "rows_other" else hint
            before.append(rows)
            what = f"{where}: the rows are not those of the global batch"
            require(sorted(rows.tolist()) == sorted(true.tolist()), what, hint)


# --- step 2: the mesh ---------------------------------------------------------------------

BOXES = {4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)], 8: [(2, 2, 2), (1, 2, 4)]}


@LAB.step(2, "the mesh", "three dimensions, tp between neighbours", "make_mesh",
          world_sizes=(4, 8))  # fmt: skip
def mesh(submission, reference, lesson):
    graft(submission, reference, "make_mesh")
    for box in BOXES[lesson.world]:
        sizes = dict(zip(AXES, box, strict=True))
        mesh = submission.make_mesh(config_of(**sizes), "cpu")
        right = isinstance(mesh, DeviceMesh)
        returns("make_mesh", mesh, right, "a DeviceMesh")
        names = list(mesh.mesh_dim_names or [])
        require(names == AXES, f"the dimensions of the mesh are named {names}", "mesh_names")
        found, true = mesh.mesh.tolist(), torch.arange(lesson.world).view(box).tolist()
        what = f"with pp × dp × tp = {shape(sizes)} the mesh is {found}, and should be {true}"
        require(found == true, what, "mesh_order")


# --- step 3: tensor parallelism -----------------------------------------------------------


@LAB.step(
    3, "cut over tp", "logits and all gradients are those of the whole model, and every "
    "matrix is cut", "cut", world_sizes=(2, 4),
    crashes={r"same length as `device_mesh.ndim`|1D DeviceMesh": "tp_mesh",
             r"must match the size|shape|size mismatch|Expected input batch|expand":
             "tp_layouts"},
)  # fmt: skip
def cutting(submission, reference, lesson):
    graft(submission, reference, "cut")
    config = config_of(tp=lesson.world)
    reference.shard = lambda module, *_: module
    cut = reference.cut

    def checked(module: nn.Module, mesh: Any) -> nn.Module:
        result = cut(module, mesh)
        returns("cut(module, mesh)", result, isinstance(result, nn.Module), "the module")
        return result

    reference.cut = checked
    model, alone, (rows,) = meshed(config)[0], plain(config), rows_of(config)
    for name, p in model.named_parameters():
        parts = p.numel() // local(p).numel()
        cut = parts == lesson.world or "norm" in name
        require(cut, f"{name} is not cut in {lesson.world}", "tp_not_cut")
    logits, true = model(rows[:, :-1]), alone(rows[:, :-1])
    found, wanted = (tuple(each.shape) for each in (logits, true))
    what = f"the logits have the shape {found}, not {wanted}"
    require(found == wanted, what, "tp_layouts")
    right = ratio(local(logits), true) == 1
    require(
        right,
        f"the logits of rank {lesson.rank} are not those of the whole model",
        "tp_layouts",
    )
    reference.loss_of(logits, rows[:, 1:]).backward()
    for name, factor in off(model, alone, rows):
        hint = "tp_norms" if "norm" in name else "tp_layouts"
        raise Wrong(f"on rank {lesson.rank} {gradient_of(name, factor)}", hint)


# --- step 4: sharding ---------------------------------------------------------------------


@LAB.step(
    4, "shard over dp", "parameters are cut over dp, products are in bf16, sums in fp32",
    "shard", world_sizes=(4,), symmetric=False, order_hint="whole_mesh",
)  # fmt: skip
def sharding(submission, reference, lesson):
    graft(submission, reference, "shard")
    config, shard = config_of(pp=2, dp=2, precision="bf16", batch=8), reference.shard

    def checked(*arguments: Any) -> nn.Module:
        result = shard(*arguments)
        wanted = "the module, as fully_shard returns it"
        returns("shard", result, isinstance(result, nn.Module), wanted)
        return result

    reference.shard = checked
    model, mesh = meshed(config)
    block, parameters = next(iter(model.blocks.values())), list(model.parameters())
    cut = type(block).__name__ != "Block" and all(isinstance(p, DTensor) for p in parameters)
    require(cut, "parameters are no DTensors over dp", "not_sharded")
    kinds = {str(p.dtype) for p in parameters}
    what = f"the parameters are kept in {', '.join(kinds)}"
    require(kinds == {"torch.float32"}, what, "fp32_weights")
    held = sum(local(p).numel() for p in parameters)
    part = round(sum(p.numel() for p in parameters) / held, 2)
    seen: dict[str, str] = {}
    block.mlp.up.register_forward_hook(lambda *a: seen.update(product=str(a[2].dtype)))

    def scattered(*arguments: Any, **options: Any) -> None:
        tensors = (x for x in (*arguments, *options.values()) if hasattr(x, "dtype"))
        seen["sum"] = str(next(tensors).dtype)

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the second from 2.13 on
        if hasattr(dist, name):
            call_before(dist, name, scattered)
    x = torch.randn(2, config.sequence, config.hidden, requires_grad=True)
    entry = rows_of(config)[0][:2, :-1] if mesh["pp"].get_local_rank() == 0 else x
    model(entry).float().square().mean().backward()  # over all ranks, it would hang here
    what = f"with dp = 2, rank {lesson.rank} holds 1/{part:g} of its stage, not 1/2"
    require(part == 2, what, "whole_mesh" if part > 2 else "not_sharded")
    product, sums = seen.get("product"), seen.get("sum")
    what = f"with the precision bf16, products are computed in {product}"
    require(product == "torch.bfloat16", what, "param_dtype")
    require(sums == "torch.float32", f"gradients are added up in {sums}", "reduce_dtype")
    config = config_of(dp=4)
    model, _ = meshed(config)
    block = next(iter(model.blocks.values()))
    block.mlp.up.register_forward_hook(lambda *a: seen.update(product=str(a[2].dtype)))
    model(rows_of(config)[0][:2, :-1])
    what = f"with the precision fp32, products are computed in {seen['product']}"
    require(seen["product"] == "torch.float32", what, "param_dtype")
    freed = all(isinstance(p, DTensor) for p in block.parameters())
    what = "without a pipeline, a block is still whole after the forward pass"
    require(freed, what, "not_freed")


# --- step 5: accumulation and clipping ----------------------------------------------------


@LAB.step(5, "accumulate and clip", "gradients of all rows, and one norm over the mesh",
          "accumulate clip", world_sizes=(2, 4))  # fmt: skip
def updating(submission, reference, lesson):
    graft(submission, reference, "accumulate", "clip")
    config = config_of(dp=2, tp=lesson.world // 2, batch=12, micro=3)
    (model, mesh), alone, (rows,) = meshed(config), plain(config), rows_of(config)
    own = rows.chunk(2)[mesh["dp"].get_local_rank()]
    live, most, taken = [], [], []

    def left(_: torch.Tensor) -> None:  # what a hook returns replaces the gradient
        live.pop()

    def entered(_: Any, inputs: tuple, output: torch.Tensor) -> None:
        live.append(output)
        most.append(len(live))
        taken.append(len(inputs[0]))
        output.register_hook(left)

    entry = model.register_forward_hook(entered)
    with lesson.phase("accumulate"):
        loss = submission.accumulate(config, model, own)
    entry.remove()
    what = f"accumulate(config, model, rows) on rank {lesson.rank}"
    returns(what, loss, isinstance(loss, torch.Tensor), "a tensor with the mean loss")
    for name, factor in off(model, alone, rows):
        hint = "rows_lost" if math.isnan(factor) or not factor else "not_divided"
        what = f"on rank {lesson.rank} {gradient_of(name, factor)}"
        raise Wrong(what, "over_dp" if factor == 0.5 else hint)
    wanted = float(loss_of(alone, own))
    what = f"rank {lesson.rank} returns the loss {float(loss):.4f}, and should return "
    what += f"{wanted:.4f}"
    require(isclose(loss, wanted, 1e-4), what, "loss_value")
    what = f"a forward pass has {max(taken)} rows, and config.micro is {config.micro}"
    require(max(taken) <= config.micro, what, "live")
    what = f"the activations of {max(most)} micro-batches are in memory at once"
    require(max(most) == 1, what, "live")
    require(not loss.requires_grad, "the returned loss has a graph", "live")
    yield "gradients and losses of all micro-batches"

    for name, p in [*model.named_parameters(), *alone.named_parameters()]:
        if "norm" in name:  # what tp ranks hold copies of: make it count
            local(p.grad).mul_(50)
    shards = [local(p.grad).double() for p in model.parameters()]
    square = sum(s.square().sum() for s in shards)
    copies, over_norms = square.clone(), square.sqrt()
    dist.all_reduce(copies)
    dist.all_reduce(over_norms)
    true = nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item()
    known = (
        (true, ""),
        (square.sqrt().item(), "norm_local"),
        (copies.sqrt().item(), "norm_copies"),
        (over_norms.item(), "norm_of_norms"),
    )
    of = f"gradients of rank {lesson.rank}"
    for limit, what, hint in (
        (0.5, f"{of} are not clipped", "not_clipped"),
        (100.0, f"{of} below the limit were changed", "clip_grows"),
    ):
        for p, gradient in zip(model.parameters(), shards, strict=True):
            local(p.grad).copy_(gradient)
        with lesson.phase("clip"):
            norm = submission.clip(dataclasses.replace(config, clip=limit), model)
        right = isinstance(norm, (float, torch.Tensor))
        returns("clip(config, model)", norm, right, "the norm")
        norm = float(norm)
        found = [each for value, *each in known if isclose(norm, value, 1e-3)]
        mistake = [*found, ["norm"]][0][-1]
        what = f"on rank {lesson.rank} clip returns the norm {norm:.4f}, and it should be "
        require(not mistake, f"{what}{true:.4f}", mistake)
        after = [local(p.grad).double() for p in model.parameters()]
        scaled = [gradient * min(1, limit / true) for gradient in shards]
        require(allclose(after, scaled, 1e-3, 1e-7), what, hint)
    if lesson.world == 2:
        return

    config = config_of(pp=2, tp=2)  # the stages have different gradients
    model, mesh = meshed(config)
    squares = torch.zeros(2)
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 1.0 + mesh["pp"].get_local_rank())
        square = local(p.grad).square().sum() / (2 if "norm" in name else 1)
        squares[mesh["pp"].get_local_rank()] += square
    dist.all_reduce(squares)
    norm, true = float(submission.clip(config, model)), squares.sum().sqrt().item()
    what = f"with pp × dp × tp = {shape({'pp': 2, 'tp': 2})}, rank {lesson.rank} "
    what += f"returns the norm {norm:.4f}, and it should be {true:.4f}"
    require(isclose(norm, true, 1e-3), what, "norm_stage")


# --- step 6: the pipeline -----------------------------------------------------------------


@LAB.step(
    6, "a pipeline", "1F1B has the losses and gradients of one process, with p - i "
    "micro-batches live", "layers_of_stage make_schedule", world_sizes=(2, 4), symmetric=False,
    crashes={
        r"^$|stage_index|out of range|Stage index|is out of": "pp_stage",
        r"losses but got 0": "pp_loss",
        r"micro-?batch|chunk|arg_mbs": "pp_scale",
        r"shape|group|rank|None|mismatch": "pp_group",
    },
)  # fmt: skip
def pipeline(submission, reference, lesson):
    graft(submission, reference, "layers_of_stage", "make_schedule")
    config = config_of(layers=4, pp=2, dp=lesson.world // 2, micro=1)
    for count, stages in ((4, 2), (6, 2), (6, 3)):
        several = config_of(layers=count, pp=stages, micro=1)
        parts = [submission.layers_of_stage(several, stage) for stage in range(stages)]
        right = hasattr(parts[0], "__iter__")
        returns("layers_of_stage", parts[0], right, "the numbers of layers")
        layers, each = [list(map(int, part)) for part in parts], count // stages
        right = layers == [list(range(i * each, (i + 1) * each)) for i in range(stages)]
        what = f"of {count} layers, the {stages} stages have {layers}"
        require(right, what, "stage_layers")
    (model, mesh), alone, (rows,) = meshed(config), plain(config), rows_of(config)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    live = {"now": 0, "peak": 0}
    events: list[str] = []

    def entered(_: Any, __: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            k = sum(event[0] == "F" for event in events)
            events.append(f"F{k}")
            live["now"] += 1
            live["peak"] = max(live["peak"], live["now"])
            output.register_hook(lambda _: live.update(now=live["now"] - 1))
            output.register_hook(lambda _: events.append(f"B{k}"))

    model.register_forward_hook(entered)
    own = rows.chunk(config.dp)[replica]
    schedule = submission.make_schedule(config, model, mesh, CPU)
    returns("make_schedule", schedule, hasattr(schedule, "step"), "the schedule")
    reference.run_pipeline(config, schedule, own, stage)  # the first asks for shapes beforehand
    model.zero_grad()
    live.update(now=0, peak=0)
    events.clear()
    loss = reference.run_pipeline(config, schedule, own, stage)
    for name, factor in off(model, alone, rows):
        raise Wrong(f"on rank {lesson.rank} {gradient_of(name, factor)}", "pp_scale")
    wanted = float(loss_of(alone, own))
    what = f"the loss of rank {lesson.rank} is {float(loss):.4f}, and should be {wanted:.4f}"
    require(stage == 0 or isclose(loss, wanted, 1e-4), what, "pp_scale")
    yield "losses and gradients of one process"
    if replica == 0:
        lesson.fact("schedule", events)
    what = f"stage {stage} has the activations of {live['peak']} micro-batches in memory at "
    what += f"once, and should have those of {2 - stage}"
    require(live["peak"] <= 2 - stage, what, "gpipe")


# --- step 7: memory -----------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Bytes of the live storages that operators have returned, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0
        self.sizes: dict[int, tuple[Any, int]] = {}
        call_before(
            torch.UntypedStorage, "resize_", self.resized
        )  # so FSDP frees gathered units

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self.sizes:
            self.note(storage, size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it comes back here with the local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.note(storage, storage.nbytes())
        return result

    def note(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        _, before = self.sizes.get(key, (None, 0))
        self.used += size - before
        self.peak = max(self.peak, self.used)
        self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size

    def forget(self, key: int) -> None:
        _, size = self.sizes.pop(key)  # before used is read: other threads may free buffers too
        self.used -= size


def memory_of(config: Any) -> tuple[int, int]:
    """Bytes of weights, gradients and moments of this rank, and the most of a step."""
    lab = LAB.finished
    with Memory() as memory:
        model, mesh = meshed(config)
        stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        rows = rows_of(config)[0].chunk(config.dp)[replica].clone()
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # from now on there are moments, as in every step but the first
        optimizer.zero_grad()
        schedule = lab.make_schedule(config, model, mesh, CPU) if config.pp > 1 else None
        memory.peak = memory.used
        if schedule is None:
            lab.accumulate(config, model, rows)
        else:
            lab.run_pipeline(config, schedule, rows, stage)
        state = sum(local(p).numel() for p in model.parameters()) * 16
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        time.sleep(0.05)  # gloo's thread drops the buffer of its last collective
    return state, memory.peak


PARTS = {"state", "gathered", "kept", "block", "logits"}
SIZE = {"layers": 4, "hidden": 64, "sequence": 64, "batch": 8, "micro": 2}
BUDGETED = [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
IN_BF16 = {"pp": 2, "dp": 2, "precision": "bf16"}  # the formulas only
# how far a part may be off: inputs of blocks are a plain count, others can be counted anew
FAR = {"kept": 1.3, "gathered": 2.0, "logits": 2.5}
needed: list[list[list[int]]] = []  # state and peak, by rank and case: measured once


def compare_parts(
    name: str, stage: int, said: dict[str, int], reference: dict[str, int]
) -> None:
    """Raise `Wrong` if a part of a budget is far from that of the finished program."""
    for part, far in FAR.items():
        found, wanted = said[part], reference[part]
        what = f'{name}: for stage {stage} the budget has {found:,} bytes in "{part}", and '
        what += f"about {wanted:,} are needed"
        require(wanted / far <= found <= wanted * far, what, part)


@LAB.trial(7, "a budget of memory", "what a rank needed is within the budget, and state is "
           "exact", uses="budget", world_sizes=(1, 4), symmetric=False)  # fmt: skip
def budget(workspace):
    told = workspace.group(1).facts("told")[0]
    if not needed:
        needed.extend(workspace.group(4, measure=True).facts("needed"))
    ratios = []
    for number, mesh in enumerate(BUDGETED):
        config = config_of(**SIZE, **mesh)
        name = f"pp × dp × tp = {shape(mesh)}"
        for rank, (state, peak) in enumerate(found[number] for found in needed):
            stage = rank // (4 // config.pp)
            said, reference = told[number][stage], LAB.finished.budget(config, stage)
            what = f"{name}: rank {rank} holds {state:,} bytes of state, the budget says "
            require(said["state"] == state, f"{what}{said['state']:,}", "state")
            compare_parts(name, stage, said, reference)
            total = sum(said.values())
            ratios.append(total / peak)
            blamed = ["too_small" if total < peak else "too_large"]
            for part in ("kept", "gathered"):
                small, large = (
                    said[part] < 0.6 * reference[part],
                    said[part] > 1.7 * reference[part],
                )
                blamed += [part] if (small if total < peak else large) else []
            what = f"{name}: rank {rank} needed ≈{peak / 1024:,.0f} KiB, the budget allows "
            require(1 <= ratios[-1] < 2, f"{what}{total / 1024:,.0f} KiB", blamed[-1])
    for stage, said in enumerate(told[-1]):
        reference = LAB.finished.budget(config_of(**SIZE, **IN_BF16), stage)
        compare_parts(f"pp × dp × tp = {shape(IN_BF16)} in bf16", stage, said, reference)
    measured = told[: len(BUDGETED)]
    workspace.scores["peak bytes"] = sum(
        sum(said.values()) for case in measured for said in case
    )
    low, high = min(ratios), max(ratios)
    yield f"the budgets are ≈{low:.2f} to ≈{high:.2f} times what was needed"


@budget.probe
def _(submission, reference, lesson):
    configs = [config_of(**SIZE, **mesh) for mesh in (*BUDGETED, IN_BF16)]
    if "measure" in lesson.arguments:  # of the finished program
        free_sends()
        lesson.fact("needed", [memory_of(config) for config in configs[:-1]])
        return
    keep_only(submission, reference, "budget")
    told = [[submission.budget(config, i) for i in range(config.pp)] for config in configs]
    for found in itertools.chain(*told):
        right = isinstance(found, dict) and set(found) == PARTS
        right = right and all(isinstance(value, int) for value in found.values())
        what = f"budget returns {show(found)}, and not five parts that are ints"
        require(right, what, "budget_keys")
    lesson.fact("told", told)


# --- step 8: checkpoints ------------------------------------------------------------------


def digest(state: dict[str, Any]) -> dict[str, dict[str, str]]:
    """A hash of every bit of each tensor of a training state that this rank's stage has."""
    found: dict[str, dict[str, str]] = {}
    for part, value in state.items():
        items = value if isinstance(value, dict) else {"": value}
        found[part] = {
            name: hashlib.sha256(whole(tensor).detach().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in sorted(items.items())
            if isinstance(tensor, torch.Tensor) and "param_groups" not in name
        }
    return found


def begun(config: Any) -> tuple[Any, ...]:
    """Model, optimizer and stream of a run that has not trained yet."""
    model, _ = meshed(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    return model, optimizer, LAB.finished.Stream(config)


@LAB.trial(8, "checkpoints that a killed rank cannot spoil", "the newest `keep` are kept",
           uses="save complete", world_sizes=(1, 2), symmetric=False,
           crashes={"No such file|Directory not empty": "one_rank"})  # fmt: skip
def saving(workspace):
    found = workspace.group(2, steps=[7]).facts("complete")
    what = f"after a save of step 7 complete() is {found[0]}"
    require(found == [[7]] * 2, what, "none_complete")
    yield "a finished checkpoint is listed"
    dying = workspace.group(2, may_die=True, steps=[8], die=True)
    killed = dying.ranks[1].status == -signal.SIGKILL
    require(killed, "save does not write by dcp.save", "no_dcp")
    facts = workspace.group(1).ranks[0].facts
    found, entries = facts["complete"], facts["entries"]
    what = f"a rank died while it saved step 8, and complete() is {found}"
    require(found == [7], what, "half_counted" if 8 in found else "overwritten")
    yield "a save that a rank did not survive leaves the checkpoint before it"
    workspace.group(2, steps=[9, 10, 11])
    facts = workspace.group(1, one=True).ranks[0].facts
    found, stay = facts["complete"], facts["entries"]
    unsorted = found != sorted(found) or 9 in found[-1:]
    hint = "steps_sorted" if unsorted else "not_dropped"
    what = f"after 9, 10 and 11, with keep = 2, complete() is {found}"
    require(found == [10, 11], what, hint)
    what = f"the folder had {entries} entries, and after 9, 10 and 11 it has {stay}"
    require(stay <= entries + 1, f"{what}, with keep = 2", "left_over")
    found = facts["one"]
    what = f"after a save of step 12 with keep = 1, complete() is {found}"
    require(found == [12], what, "not_dropped")


@saving.probe
def _(submission, reference, lesson):
    graft(submission, reference, "save", "complete")
    config, steps = config_of(dp=2, keep=2), lesson.arguments.get("steps", [])
    empty = submission.complete(dataclasses.replace(config, folder="no-such-folder"))
    returns("complete", empty, isinstance(empty, list), "a list of step numbers")
    require(not empty, f"before the first save, complete() is {empty}", "none_complete")
    rename = os.rename

    def later(*names: Any) -> None:  # other ranks do not wait by accident
        time.sleep(0.3)
        rename(*names)

    if 7 in steps:
        os.rename = os.replace = later
    if "die" in lesson.arguments:
        write = dcp.FileSystemWriter.write_data

        def dying(self: Any, plan: Any, planner: Any) -> Any:
            if lesson.rank == 1:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            written = write(self, plan, planner)
            written.wait()
            dist.barrier()
            return written

        dcp.FileSystemWriter.write_data = dying
    state = reference.training_state(*begun(config), 0) if steps else {}
    for step in steps:
        state["step"] = torch.tensor(step)
        submission.save(config, state)
    found = submission.complete(config)
    numbers = all(isinstance(step, int) for step in found)
    require(numbers, f"complete() is {found}, and not a list of ints", "steps_sorted")
    lesson.fact("complete", found)
    if not steps:
        lesson.fact("entries", len(os.listdir(config.folder)))
    if "one" in lesson.arguments:
        config = config_of(keep=1)
        submission.save(config, reference.training_state(*begun(config), 12))
        lesson.fact("one", submission.complete(config))


# --- step 9: resuming ---------------------------------------------------------------------

RESTORED = {"model": "resume_model", "optimizer": "resume_moments", "stream": "resume_stream"}
saved: list[tuple[dict, dict[Path, bytes]]] = []  # by the finished program: its bits and files


@LAB.trial(9, "resume on any mesh", "parameters, moments and the place in the data are "
           "restored", uses="load", world_sizes=(2, 4), symmetric=False)  # fmt: skip
def resuming(workspace):
    box = {"dp": 2, "tp": 2}
    if not saved:
        bits = workspace.group(4, mesh=box, replicas=[0, 0, 1, 1]).facts("digest")[0]
        paths = [path for path in workspace.folder.rglob("*") if path.is_file()]
        saved.append(
            (bits, {path.relative_to(workspace.folder): path.read_bytes() for path in paths})
        )
    bits, files = saved[0]
    for name, content in files.items():
        (workspace.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace.folder / name).write_bytes(content)
    for world, mesh in ((4, box), (2, {"tp": 2}), (2, {"pp": 2})):
        workspace.group(world, mesh=mesh, saved=bits)
        yield f"every bit comes back as {shape(mesh)}"


@resuming.probe
def _(submission, reference, lesson):
    graft(submission, reference, "load")
    arguments, rank = lesson.arguments, lesson.rank
    config = config_of(**arguments["mesh"])
    if "saved" not in arguments:
        model, optimizer, stream = parts = begun(config)
        for step in (1, 2):
            reference.accumulate(config, model, stream.next(arguments["replicas"][rank]))
            optimizer.step()
            optimizer.zero_grad()
            reference.save(config, reference.training_state(*parts, step))
        lesson.fact("digest", digest(reference.training_state(*parts, 2)))
        return
    parts = begun(dataclasses.replace(config, seed=5))
    if "tp" in arguments["mesh"]:
        try:
            step = submission.load(dataclasses.replace(config, folder="no-such-folder"), *parts)
        except NotImplementedError:
            raise
        except (Exception, dcp.api.CheckpointException) as error:
            what = f"without a checkpoint, load failed: {type(error).__name__}: {error}"
            raise Wrong(what, "resume_none") from error
        require(step == 0, f"without a checkpoint, load returned {step}", "resume_none")
    step = submission.load(config, *parts)
    returns("load", step, isinstance(step, (int, torch.Tensor)), "a step number")
    step = int(step)
    found = digest(reference.training_state(*parts, 2))
    for part, hint in RESTORED.items():
        what = f"loaded as {shape(arguments['mesh'])}, the {part} of rank {rank} differs in its bits"
        for key, bits in found[part].items():
            right = bits == arguments["saved"][part].get(key)
            require(right, f"{what}: {key or 'the generator'}", hint)
    what = f"load returned {step} on rank {rank}, the checkpoint is of step 2"
    require(step == 2, what, "resume_step")


# --- step 10: the whole run ---------------------------------------------------------------

# torchrun, whose ranks are forked from it: what they all import is imported once
TORCHRUN = """\
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from torch.distributed.run import main
main()
"""
DRIVE = """\
import importlib.util, json, os, sys
import torch.distributed as dist
spec = importlib.util.spec_from_file_location("learner", sys.argv[1])
module = sys.modules["learner"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
config, device = module.Config(**json.loads(sys.argv[2])), module.join()
rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(f"rank-{rank}", "w") as file:
    file.write(str(os.getpid()))
def say(line):
    if rank == 0:
        with open("said.txt", "a", encoding="utf-8") as file:
            print(line, file=file)
say(f"life {life}")
try:
    history = module.train(config, device, say)
except SystemExit as end:
    raise RuntimeError("sys.exit") from end
if rank == 0:
    with open(f"life-{life}.json", "w") as file:
        json.dump(history, file)
dist.barrier()
"""
RUN = {"dp": 2, "micro": 2, "layers": 2, "steps": 10, "every": 3, "log": 1}
BOX = {"pp": 2, "dp": 2, "tp": 2, "steps": 3}  # compared with one process, too


def world_of(run: dict[str, Any]) -> int:
    return math.prod(run.get(axis, 1) for axis in AXES)


STEP = re.compile(r"^step +(\d+)/", re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kill_and_resume(
    workspace: Workspace, undisturbed: list[list[float]], chance: random.Random, run: dict = RUN
) -> int:
    """Kill a rank of a real torchrun at a random moment; return how many steps were lost.

    They are lost that were complete and had to be computed again. The moment lies behind the
    first checkpoint, so that a life which does not look for one has lost too many.
    """
    world, (low, high) = world_of(run), (run["every"] + 1, run["steps"] - 2)
    victim, at, pause = chance.randrange(world), chance.randint(low, high), chance.random() / 10
    folder, said, killed = workspace.folder / "killed", workspace.folder / "said.txt", []
    for name, text in (("torchrun.py", TORCHRUN), ("drive.py", DRIVE)):
        (workspace.folder / name).write_text(text)
    for path in (said, *workspace.folder.glob("life-*.json")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

    def watch(_: dict[int, int]) -> None:
        steps = STEP.findall(text_of(said)) if not killed else []
        if steps and int(steps[-1]) >= at:
            time.sleep(pause)  # into a step, an update or a save
            with contextlib.suppress(OSError):
                os.kill(int(text_of(workspace.folder / f"rank-{victim}")), signal.SIGKILL)
                killed.append(victim)

    start = "fork" if LINUX else "spawn"
    torchrun = ("torchrun.py", f"--nproc-per-node={world}", "--max-restarts=3", "--run-path",
                f"--start-method={start}", workspace.folder / "drive.py")  # fmt: skip
    config = json.dumps(FLAT | run | {"folder": "killed"})
    end = workspace.run("python", *torchrun, workspace.path, config, limit=120, watch=watch,
                    OMP_NUM_THREADS="1")  # fmt: skip
    lives, told = sorted(workspace.folder.glob("life-*.json")), text_of(said)
    if not killed and not end.status:
        require(STEP.search(told), "the run ended, and had told of no step", "untold")
        return kill_and_resume(workspace, undisturbed, chance, run)  # it was over before
    what = f"rank {victim} was killed, and torchrun ended with status {end.status}"
    require(lives and not end.status, what, "not_recovered")
    history = json.loads(text_of(lives[-1]))
    first = history[0][0] if history else run["steps"] + 1
    before = told.rpartition("life ")[0]  # what all lives but the last said
    reached = max(map(int, STEP.findall(before)), default=0)
    lost = reached + 1 - first
    what = f"the run had come to step {reached}, and went on with step {first:.0f}"
    require(lost <= run["every"], what, "lost_steps")
    right = history == undisturbed[len(undisturbed) - len(history) :]
    require(right, f"from step {first:.0f} the losses differ", "after_kill")
    return int(max(0, lost))


@LAB.trial(
    10, "the whole run, and a killed rank", "the run survives a rank", uses="train join",
    world_sizes=(2, 8), symmetric=False, needs=(1, 2, 3, 4, 5, 6, 8, 9),
)  # fmt: skip
def whole_run(workspace, run=RUN, box=BOX):
    for number, config in enumerate((box, run)):
        config = config | {"folder": f"own-{number}"}
        own = workspace.group(world_of(config), config=config, truth=True)
        true = own.ranks[0].facts["truth"]
        for history in own.facts("history"):
            what = f"the run has {len(history)} steps, and should have {len(true)}"
            require(len(history) == len(true), what, "not_truth")
            for (step, *reference), (loss, norm) in zip(history, true, strict=True):
                what = f"step {step:.0f}: loss {reference[0]:.4f}, "
                what += f"norm {reference[1]:.4f}; one process "
                right = isclose(reference[0], loss, 1e-3) and isclose(reference[1], norm, 1e-2)
                require(right, f"{what}has {loss:.4f} and {norm:.4f}", "not_truth")
        yield f"the losses and norms of one process as {shape(config)}"
    undisturbed, seconds = history, sum(own.facts("seconds"))

    def again(folder: str, **arguments: Any) -> float:
        group = workspace.group(world_of(run), config=run | {"folder": folder}, **arguments)
        return sum(group.facts("seconds"))

    submission = again("finished", finished=True)
    if seconds > 1.5 * submission:  # a busy machine looks the same: both once more
        seconds = min(seconds, again("own-2"))
        submission = min(submission, again("finished-2", finished=True))
    what = f"a step takes {seconds:.3f} s of processor time, one of the finished program "
    require(seconds <= 1.5 * submission, f"{what}{submission:.3f} s", "slow")
    yield "throughput is that of the finished program"
    lost = kill_and_resume(workspace, undisturbed, random.Random(), run)
    yield f"a rank was killed; ≈{lost} steps were computed again, and no loss differs in a bit"


@whole_run.probe
def _(submission, reference, lesson):
    free_sends()
    arguments, submission.text = lesson.arguments, reference.text
    module = reference if arguments.get("finished") else submission
    config = module.Config(**FLAT | arguments["config"])
    ends = [time.process_time()]
    register_optimizer_step_post_hook(lambda *_: ends.append(time.process_time()))
    history = module.train(config, CPU, lambda line: None)
    # of a quick step: the first fill DTensor's caches, some save, others are disturbed
    steps = [b - a for a, b in itertools.pairwise(ends)]
    lesson.fact("seconds", statistics.quantiles(steps)[0] if len(steps) > 1 else 0.0)
    lesson.fact("history", history)
    if arguments.get("truth") and lesson.rank == 0:
        lesson.fact("truth", truth(config))
