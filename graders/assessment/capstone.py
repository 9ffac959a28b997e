"""The steps of the capstone.

Each of the first nine steps is graded separately: only the functions of this step are the
learner's, and all other functions are those of the finished program. The tenth step runs the
learner's whole file, and kills one of its ranks. The results are compared with those of a plain
loop in one process, which uses no mesh, no FSDP and no DTensor.
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
import torch._dynamo  # imported here once, because optimizers would import it in every rank
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.fx.experimental.symbolic_shapes  # backward(gradient) would import it in every rank
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
LAB.finished.text("")  # fills the cache of this function once, so that the ranks share it


# --- the finished program, and the truth --------------------------------------------------


def use_same_sends() -> None:
    """Let `dist` have the same isend and irecv as distributed_c10d, as pipelining requires."""
    dist.isend, dist.irecv = distributed_c10d.isend, distributed_c10d.irecv


def combine_functions(submission: ModuleType, reference: ModuleType, *own: str) -> None:
    """Use the learner's functions `own`, and all other functions of the finished program.

    Afterwards this is true in both modules.
    """
    use_same_sends()
    keep_only(submission, reference, *own)
    for name in own:
        setattr(reference, name, getattr(submission, name))


def config_of(**changes: Any) -> Any:
    """Return the configuration FLAT with these changes."""
    return LAB.finished.Config(**FLAT | changes)


def shape(mesh: dict[str, int]) -> str:
    """Return the sizes of the axes of a mesh as a text, such as "1 × 2 × 2"."""
    return " × ".join(str(mesh.get(axis, 1)) for axis in AXES)


def whole_model(config: Any) -> nn.Module:
    """Return the whole model for one process, without DTensors and hooks."""
    one = dataclasses.replace(config, pp=1, dp=1, tp=1)
    mesh = dict.fromkeys(AXES, SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1))
    with mock.patch.multiple(
        LAB.finished, shard=lambda module, *_: module, cut=lambda module, *_: module,
        layers_of_stage=lambda config, _: range(config.layers),
    ):  # fmt: skip
        return LAB.finished.build(one, mesh, CPU)


def model_part(config: Any) -> tuple[nn.Module, Any]:
    """Return the part of the model that this rank has, and the mesh."""
    mesh = LAB.finished.make_mesh(config, "cpu")
    return LAB.finished.build(config, mesh, CPU), mesh


def rows_of(config: Any, count: int = 1) -> list[torch.Tensor]:
    """Return the first global batches, by the rule that the hints of step 1 describe."""
    generator = torch.Generator().manual_seed(config.seed)
    text, batches = LAB.finished.text(config.text), []
    for _ in range(count):
        last = len(text) - config.sequence - 1
        places = torch.randint(last, (config.batch,), generator=generator)
        batches.append(text[places[:, None] + torch.arange(config.sequence + 1)])
    return batches


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of a model on these rows."""
    return LAB.finished.loss_of(model(rows[:, :-1]), rows[:, 1:])


def truth(config: Any) -> list[list[float]]:
    """Return [loss, norm] of each training step in one process."""
    model = whole_model(config)
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


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a DTensor. Other tensors are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor. Other tensors are returned as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def ratio(found: torch.Tensor, true: torch.Tensor) -> float:
    """Return the factor by which a tensor is a multiple of the true tensor, or nan."""
    if found.shape != true.shape:
        return math.nan
    factor = ((found * true).sum() / true.square().sum()).item()
    return round(factor, 4) if torch.allclose(found, factor * true, 1e-3, 1e-6) else math.nan


def wrong_gradients(
    model: nn.Module, whole: nn.Module, rows: torch.Tensor
) -> Iterator[tuple[str, float]]:
    """Yield the names and ratios of this rank's parameters whose gradient is wrong.

    The ratio is the factor between the gradient and the true gradient, which is that of the
    whole model on these rows.
    """
    loss_of(whole, rows).backward()
    parameters = dict(whole.named_parameters())
    ratios = {
        name: ratio(full_tensor(p.grad), parameters[name].grad) if p.grad is not None else 0.0
        for name, p in model.named_parameters()
    }
    return ((name, factor) for name, factor in ratios.items() if not isclose(factor, 1, 1e-3))


def require_result(call: str, value: Any, is_right: bool, wanted: str) -> None:
    """Raise `Wrong` unless a call has returned a value of the right kind."""
    found = "None" if value is None else f"a {type(value).__name__}"
    require(is_right, f"{call} returns {found}, and should return {wanted}", "returned")


def gradient_of(name: str, factor: float) -> str:
    """Return a sentence about a wrong gradient."""
    return f"the gradient of {name} is " + (
        "not a multiple of the true gradient"
        if math.isnan(factor)
        else f"{factor} times the true gradient"
    )


# --- step 1: data -------------------------------------------------------------------------


@LAB.alone(1, "rows for every replica", "the replicas' rows are those of one process, batch "
           "after batch", "Stream")  # fmt: skip
def data(submission, reference, lesson):
    combine_functions(submission, reference, "Stream")
    Path("letters.txt").write_bytes(bytes(range(256)) * 2)
    for dp, file in ((1, ""), (2, ""), (4, ""), (2, "letters.txt")):
        config = config_of(dp=dp, text=file)
        streams = [submission.Stream(config) for _ in range(dp)]
        batches: list[torch.Tensor] = []
        for number, true in enumerate(rows_of(config, 2), start=1):
            where = f"dp = {dp}, batch {number}" + f", text = {file}" * bool(file)
            parts = [stream.next(r) for r, stream in enumerate(streams)]
            is_tensor = isinstance(parts[0], torch.Tensor)
            require_result("Stream.next", parts[0], is_tensor, "a tensor of rows")
            shapes = {tuple(part.shape) for part in parts}
            found = ", ".join("×".join(map(str, shape)) for shape in shapes)
            right = shapes == {(config.batch // dp, config.sequence + 1)}
            require(right, f"{where}: the rows have the shape {found}", "rows_shape")
            rows = torch.cat(parts)
            hint = "rows_same" if dp > 1 and torch.equal(*parts[:2]) else "rows_other"
            hint = "rows_again" if batches and torch.equal(rows, batches[0]) else hint
            hint = "rows_text" if file and hint == "rows_other" else hint
            batches.append(rows)
            what = f"{where}: the rows are not those of the global batch"
            require(sorted(rows.tolist()) == sorted(true.tolist()), what, hint)


# --- step 2: the mesh ---------------------------------------------------------------------

# the sizes of the axes of the meshes, by world size
MESHES = {4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)], 8: [(2, 2, 2), (1, 2, 4)]}


@LAB.step(2, "the mesh", "three dimensions, tp between neighbours", "make_mesh",
          world_sizes=(4, 8))  # fmt: skip
def mesh(submission, reference, lesson):
    combine_functions(submission, reference, "make_mesh")
    for axes in MESHES[lesson.world]:
        sizes = dict(zip(AXES, axes, strict=True))
        mesh = submission.make_mesh(config_of(**sizes), "cpu")
        require_result("make_mesh", mesh, isinstance(mesh, DeviceMesh), "a DeviceMesh")
        names = list(mesh.mesh_dim_names or [])
        require(names == AXES, f"the dimensions of the mesh are named {names}", "mesh_names")
        found, true = mesh.mesh.tolist(), torch.arange(lesson.world).view(axes).tolist()
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
    combine_functions(submission, reference, "cut")
    config = config_of(tp=lesson.world)
    reference.shard = lambda module, *_: module
    cut = reference.cut

    def cut_and_check(module: nn.Module, mesh: Any) -> nn.Module:
        result = cut(module, mesh)
        require_result("cut(module, mesh)", result, isinstance(result, nn.Module), "the module")
        return result

    reference.cut = cut_and_check
    model, whole, (rows,) = model_part(config)[0], whole_model(config), rows_of(config)
    for name, p in model.named_parameters():
        parts = p.numel() // local_tensor(p).numel()
        is_cut = parts == lesson.world or "norm" in name
        require(is_cut, f"{name} is not cut into {lesson.world} parts", "tp_not_cut")
    logits, true = model(rows[:, :-1]), whole(rows[:, :-1])
    found, wanted = (tuple(each.shape) for each in (logits, true))
    what = f"the logits have the shape {found}, not {wanted}"
    require(found == wanted, what, "tp_layouts")
    right = ratio(local_tensor(logits), true) == 1
    require(
        right,
        f"the logits of rank {lesson.rank} are not those of the whole model",
        "tp_layouts",
    )
    reference.loss_of(logits, rows[:, 1:]).backward()
    for name, factor in wrong_gradients(model, whole, rows):
        hint = "tp_norms" if "norm" in name else "tp_layouts"
        raise Wrong(f"on rank {lesson.rank} {gradient_of(name, factor)}", hint)


# --- step 4: sharding ---------------------------------------------------------------------


@LAB.step(
    4, "shard over dp", "parameters are cut over dp, products are in bf16, sums in fp32",
    "shard", world_sizes=(4,), symmetric=False, order_hint="whole_mesh",
)  # fmt: skip
def sharding(submission, reference, lesson):
    combine_functions(submission, reference, "shard")
    config, shard = config_of(pp=2, dp=2, precision="bf16", batch=8), reference.shard

    def shard_and_check(*arguments: Any) -> nn.Module:
        result = shard(*arguments)
        wanted = "the module, as fully_shard returns it"
        require_result("shard", result, isinstance(result, nn.Module), wanted)
        return result

    reference.shard = shard_and_check
    model, mesh = model_part(config)
    block, parameters = next(iter(model.blocks.values())), list(model.parameters())
    is_sharded = type(block).__name__ != "Block"
    is_sharded = is_sharded and all(isinstance(p, DTensor) for p in parameters)
    require(is_sharded, "the parameters are not DTensors over dp", "not_sharded")
    names = {str(p.dtype) for p in parameters}
    what = f"the dtype of the parameters is {' or '.join(names)}; it should be torch.float32"
    require(names == {"torch.float32"}, what, "fp32_weights")
    local_numel = sum(local_tensor(p).numel() for p in parameters)
    divisor = round(sum(p.numel() for p in parameters) / local_numel, 2)
    dtypes: dict[str, str] = {}
    block.mlp.up.register_forward_hook(lambda *a: dtypes.update(product=str(a[2].dtype)))

    def record_sum(*arguments: Any, **options: Any) -> None:
        tensors = (x for x in (*arguments, *options.values()) if hasattr(x, "dtype"))
        dtypes["sum"] = str(next(tensors).dtype)

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the second from 2.13 on
        if hasattr(dist, name):
            call_before(dist, name, record_sum)
    x = torch.randn(2, config.sequence, config.hidden, requires_grad=True)
    entry = rows_of(config)[0][:2, :-1] if mesh["pp"].get_local_rank() == 0 else x
    # if the parameters are sharded over all ranks, this call hangs
    model(entry).float().square().mean().backward()
    what = f"with dp = 2, rank {lesson.rank} stores 1/{divisor:g} of its stage, not 1/2"
    require(divisor == 2, what, "whole_mesh" if divisor > 2 else "not_sharded")
    product, sums = dtypes.get("product"), dtypes.get("sum")
    what = f"with the precision bf16, products are computed in {product}"
    require(product == "torch.bfloat16", what, "param_dtype")
    require(sums == "torch.float32", f"gradients are added up in {sums}", "reduce_dtype")
    config = config_of(dp=4)
    model, _ = model_part(config)
    block = next(iter(model.blocks.values()))
    block.mlp.up.register_forward_hook(lambda *a: dtypes.update(product=str(a[2].dtype)))
    model(rows_of(config)[0][:2, :-1])
    what = f"with the precision fp32, products are computed in {dtypes['product']}"
    require(dtypes["product"] == "torch.float32", what, "param_dtype")
    is_freed = all(isinstance(p, DTensor) for p in block.parameters())
    what = "without a pipeline, a block is still whole after the forward pass"
    require(is_freed, what, "not_freed")


# --- step 5: accumulation and clipping ----------------------------------------------------


@LAB.step(5, "accumulate and clip", "gradients of all rows, and one norm over the mesh",
          "accumulate clip", world_sizes=(2, 4))  # fmt: skip
def updating(submission, reference, lesson):
    combine_functions(submission, reference, "accumulate", "clip")
    config = config_of(dp=2, tp=lesson.world // 2, batch=12, micro=3)
    (model, mesh), whole, (rows,) = model_part(config), whole_model(config), rows_of(config)
    own = rows.chunk(2)[mesh["dp"].get_local_rank()]
    # the outputs that have no backward pass yet, their number after each forward pass, and the
    # number of rows of each forward pass
    live, live_counts, row_counts = [], [], []

    def after_backward(_: torch.Tensor) -> None:  # returns None, so the gradient stays the same
        live.pop()

    def after_forward(_: Any, inputs: tuple, output: torch.Tensor) -> None:
        live.append(output)
        live_counts.append(len(live))
        row_counts.append(len(inputs[0]))
        output.register_hook(after_backward)

    handle = model.register_forward_hook(after_forward)
    with lesson.phase("accumulate"):
        loss = submission.accumulate(config, model, own)
    handle.remove()
    what = f"accumulate(config, model, rows) on rank {lesson.rank}"
    require_result(what, loss, isinstance(loss, torch.Tensor), "a tensor with the mean loss")
    for name, factor in wrong_gradients(model, whole, rows):
        hint = "rows_lost" if math.isnan(factor) or not factor else "not_divided"
        what = f"on rank {lesson.rank} {gradient_of(name, factor)}"
        raise Wrong(what, "over_dp" if factor == 0.5 else hint)
    wanted = float(loss_of(whole, own))
    what = f"rank {lesson.rank} returns the loss {float(loss):.4f}, and should return "
    what += f"{wanted:.4f}"
    require(isclose(loss, wanted, 1e-4), what, "loss_value")
    what = f"a forward pass has {max(row_counts)} rows, but config.micro is {config.micro}"
    require(max(row_counts) <= config.micro, what, "live")
    what = f"the activations of {max(live_counts)} micro-batches are in memory at once"
    require(max(live_counts) == 1, what, "live")
    require(not loss.requires_grad, "the returned loss has a graph", "live")
    yield "gradients and losses of all micro-batches"

    for name, p in [*model.named_parameters(), *whole.named_parameters()]:
        if "norm" in name:  # all tp ranks have copies of it, so make its gradient large
            local_tensor(p.grad).mul_(50)
    shards = [local_tensor(p.grad).double() for p in model.parameters()]
    square = sum(s.square().sum() for s in shards)
    copies, over_norms = square.clone(), square.sqrt()
    dist.all_reduce(copies)
    dist.all_reduce(over_norms)
    true = nn.utils.get_total_norm([p.grad for p in whole.parameters()]).item()
    known = (
        (true, ""),
        (square.sqrt().item(), "norm_local"),
        (copies.sqrt().item(), "norm_copies"),
        (over_norms.item(), "norm_of_norms"),
    )
    gradients = f"the gradients of rank {lesson.rank}"
    for limit, fault, hint in (
        (0.5, f"{gradients} are not clipped", "not_clipped"),
        (100.0, f"{gradients} are below the limit, but clip changed them", "clip_grows"),
    ):
        for p, gradient in zip(model.parameters(), shards, strict=True):
            local_tensor(p.grad).copy_(gradient)
        with lesson.phase("clip"):
            norm = submission.clip(dataclasses.replace(config, clip=limit), model)
        is_number = isinstance(norm, (float, torch.Tensor))
        require_result("clip(config, model)", norm, is_number, "the norm")
        norm = float(norm)
        mistakes = [name for value, name in known if isclose(norm, value, 1e-3)]
        mistake = [*mistakes, "norm"][0]
        what = f"on rank {lesson.rank} clip returns the norm {norm:.4f}, and it should be "
        require(not mistake, f"{what}{true:.4f}", mistake)
        after = [local_tensor(p.grad).double() for p in model.parameters()]
        scaled = [gradient * min(1, limit / true) for gradient in shards]
        require(allclose(after, scaled, 1e-3, 1e-7), fault, hint)
    if lesson.world == 2:
        return

    config = config_of(pp=2, tp=2)  # the stages have different gradients
    model, mesh = model_part(config)
    squares = torch.zeros(2)
    for name, p in model.named_parameters():
        p.grad = torch.full_like(p, 1.0 + mesh["pp"].get_local_rank())
        square = local_tensor(p.grad).square().sum() / (2 if "norm" in name else 1)
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
    combine_functions(submission, reference, "layers_of_stage", "make_schedule")
    config = config_of(layers=4, pp=2, dp=lesson.world // 2, micro=1)
    for count, stages in ((4, 2), (6, 2), (6, 3)):
        several = config_of(layers=count, pp=stages, micro=1)
        parts = [submission.layers_of_stage(several, stage) for stage in range(stages)]
        is_iterable = hasattr(parts[0], "__iter__")
        require_result("layers_of_stage", parts[0], is_iterable, "the numbers of layers")
        layers, each = [list(map(int, part)) for part in parts], count // stages
        right = layers == [list(range(i * each, (i + 1) * each)) for i in range(stages)]
        what = f"of {count} layers, the {stages} stages have {layers}"
        require(right, what, "stage_layers")
    (model, mesh), whole, (rows,) = model_part(config), whole_model(config), rows_of(config)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    live = {"now": 0, "peak": 0}
    events: list[str] = []

    def after_forward(_: Any, __: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            k = sum(event[0] == "F" for event in events)
            events.append(f"F{k}")
            live["now"] += 1
            live["peak"] = max(live["peak"], live["now"])
            output.register_hook(lambda _: live.update(now=live["now"] - 1))
            output.register_hook(lambda _: events.append(f"B{k}"))

    model.register_forward_hook(after_forward)
    own = rows.chunk(config.dp)[replica]
    schedule = submission.make_schedule(config, model, mesh, CPU)
    require_result("make_schedule", schedule, hasattr(schedule, "step"), "the schedule")
    # the first run also exchanges the shapes of tensors, so it is not recorded
    reference.run_pipeline(config, schedule, own, stage)
    model.zero_grad()
    live.update(now=0, peak=0)
    events.clear()
    loss = reference.run_pipeline(config, schedule, own, stage)
    for name, factor in wrong_gradients(model, whole, rows):
        raise Wrong(f"on rank {lesson.rank} {gradient_of(name, factor)}", "pp_scale")
    wanted = float(loss_of(whole, own))
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
    """Counts the bytes of the live storages that operators have returned, and their maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0
        self.sizes: dict[int, tuple[Any, int]] = {}
        # FSDP frees a gathered unit by resizing its storage
        call_before(torch.UntypedStorage, "resize_", self.record_resize)

    def record_resize(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata in self.sizes:
            self.record_size(storage, size)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # then torch calls this function with the local tensors
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.record_size(storage, storage.nbytes())
        return result

    def record_size(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        _, before = self.sizes.get(key, (None, 0))
        self.used += size - before
        self.peak = max(self.peak, self.used)
        self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size

    def forget(self, key: int) -> None:
        # pop first and then read `used`, because other threads may free buffers too
        _, size = self.sizes.pop(key)
        self.used -= size


def memory_of(config: Any) -> tuple[int, int]:
    """Return the bytes of this rank's training state, and the peak memory of a step.

    The training state consists of weights, gradients and moments.
    """
    lab = LAB.finished
    with Memory() as memory:
        model, mesh = model_part(config)
        stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        rows = rows_of(config)[0].chunk(config.dp)[replica].clone()
        optimizer = torch.optim.AdamW(model.parameters())
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # creates the moments, which exist in every step except the first
        optimizer.zero_grad()
        schedule = lab.make_schedule(config, model, mesh, CPU) if config.pp > 1 else None
        memory.peak = memory.used
        if schedule is None:
            lab.accumulate(config, model, rows)
        else:
            lab.run_pipeline(config, schedule, rows, stage)
        state = sum(local_tensor(p).numel() for p in model.parameters()) * 16
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        time.sleep(0.05)  # until gloo's thread frees the buffer of its last collective
    return state, memory.peak


PARTS = {"state", "gathered", "kept", "block", "logits"}
SIZE = {"layers": 4, "hidden": 64, "sequence": 64, "batch": 8, "micro": 2}
MEASURED_MESHES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
IN_BF16 = {"pp": 2, "dp": 2, "precision": "bf16"}  # is not measured
# The largest factor between a part of a budget and that of the finished program. The inputs of
# blocks have only one count. There are several ways to count the other parts.
TOLERANCES = {"kept": 1.3, "gathered": 2.0, "logits": 2.5}
# state and peak of the finished program, by rank and mesh. They are measured only once
measurements: list[list[list[int]]] = []


def compare_parts(
    name: str, stage: int, budget: dict[str, int], reference: dict[str, int]
) -> None:
    """Raise `Wrong` if a part of a budget is far from that of the finished program."""
    for part, tolerance in TOLERANCES.items():
        found, wanted = budget[part], reference[part]
        what = f'{name}: for stage {stage} the budget has {found:,} bytes in "{part}", but '
        what += f"about {wanted:,} are needed"
        require(wanted / tolerance <= found <= wanted * tolerance, what, part)


@LAB.trial(7, "a budget of memory", "what a rank needed is within the budget, and state is "
           "exact", uses="budget", world_sizes=(1, 4), symmetric=False)  # fmt: skip
def budget(workspace):
    budgets = workspace.group(1).facts("budgets")[0]
    if not measurements:
        measurements.extend(workspace.group(4, measure=True).facts("memory"))
    ratios = []
    for number, mesh in enumerate(MEASURED_MESHES):
        config = config_of(**SIZE, **mesh)
        name = f"pp × dp × tp = {shape(mesh)}"
        for rank, (state, peak) in enumerate(found[number] for found in measurements):
            stage = rank // (4 // config.pp)
            found, reference = budgets[number][stage], LAB.finished.budget(config, stage)
            what = f"{name}: rank {rank} stores {state:,} bytes of state, but the budget has "
            require(found["state"] == state, f"{what}{found['state']:,}", "state")
            compare_parts(name, stage, found, reference)
            total = sum(found.values())
            ratios.append(total / peak)
            is_small = total < peak
            hints = ["too_small" if is_small else "too_large"]
            for part in ("kept", "gathered"):
                low, high = 0.6 * reference[part], 1.7 * reference[part]
                hints += (
                    [part] if (found[part] < low if is_small else found[part] > high) else []
                )
            what = f"{name}: rank {rank} needed ≈{peak / 1024:,.0f} KiB, but the budget has "
            require(1 <= ratios[-1] < 2, f"{what}{total / 1024:,.0f} KiB", hints[-1])
    for stage, found in enumerate(budgets[-1]):
        reference = LAB.finished.budget(config_of(**SIZE, **IN_BF16), stage)
        compare_parts(f"pp × dp × tp = {shape(IN_BF16)} in bf16", stage, found, reference)
    measured = budgets[: len(MEASURED_MESHES)]
    workspace.scores["peak bytes"] = sum(
        sum(budget.values()) for case in measured for budget in case
    )
    low, high = min(ratios), max(ratios)
    yield f"the budgets are ≈{low:.2f} to ≈{high:.2f} times what was needed"


@budget.probe
def _(submission, reference, lesson):
    configs = [config_of(**SIZE, **mesh) for mesh in (*MEASURED_MESHES, IN_BF16)]
    if "measure" in lesson.arguments:  # measure the finished program
        use_same_sends()
        lesson.fact("memory", [memory_of(config) for config in configs[:-1]])
        return
    keep_only(submission, reference, "budget")
    budgets = [[submission.budget(config, i) for i in range(config.pp)] for config in configs]
    for found in itertools.chain(*budgets):
        right = isinstance(found, dict) and set(found) == PARTS
        right = right and all(isinstance(value, int) for value in found.values())
        what = f"budget returns {show(found)}, and not five parts that are ints"
        require(right, what, "budget_keys")
    lesson.fact("budgets", budgets)


# --- step 8: checkpoints ------------------------------------------------------------------


def digest(state: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Return a hash of all bits of each tensor in the training state of this rank's stage."""
    found: dict[str, dict[str, str]] = {}
    for part, value in state.items():
        items = value if isinstance(value, dict) else {"": value}
        found[part] = {
            name: hashlib.sha256(full_tensor(tensor).detach().numpy().tobytes()).hexdigest()[
                :16
            ]
            for name, tensor in sorted(items.items())
            if isinstance(tensor, torch.Tensor) and "param_groups" not in name
        }
    return found


def new_run(config: Any) -> tuple[Any, ...]:
    """Return the model, the optimizer and the stream of a run that has not trained yet."""
    model, _ = model_part(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    return model, optimizer, LAB.finished.Stream(config)


@LAB.trial(8, "checkpoints that a killed rank cannot spoil", "the newest `keep` are kept",
           uses="save complete", world_sizes=(1, 2), symmetric=False,
           crashes={"No such file|Directory not empty": "one_rank"})  # fmt: skip
def saving(workspace):
    found = workspace.group(2, steps=[7]).facts("complete")
    what = f"after a save of step 7, complete() returns {found[0]}"
    require(found == [[7]] * 2, what, "none_complete")
    yield "a finished checkpoint is listed"
    dying = workspace.group(2, may_die=True, steps=[8], die=True)
    killed = dying.ranks[1].status == -signal.SIGKILL
    require(killed, "save does not use dcp.save", "no_dcp")
    facts = workspace.group(1).ranks[0].facts
    found, entries = facts["complete"], facts["entries"]
    what = f"a rank died while it saved step 8, and complete() returns {found}"
    require(found == [7], what, "half_counted" if 8 in found else "overwritten")
    yield "a save that a rank did not survive leaves the checkpoint before it"
    workspace.group(2, steps=[9, 10, 11])
    facts = workspace.group(1, one=True).ranks[0].facts
    found, entries_after = facts["complete"], facts["entries"]
    is_unsorted = found != sorted(found) or 9 in found[-1:]
    hint = "steps_sorted" if is_unsorted else "not_dropped"
    what = f"after steps 9, 10 and 11, with keep = 2, complete() returns {found}"
    require(found == [10, 11], what, hint)
    what = f"the folder had {entries} entries, and after steps 9, 10 and 11 it has "
    what += f"{entries_after}, with keep = 2"
    require(entries_after <= entries + 1, what, "left_over")
    found = facts["one"]
    what = f"after a save of step 12 with keep = 1, complete() returns {found}"
    require(found == [12], what, "not_dropped")


@saving.probe
def _(submission, reference, lesson):
    combine_functions(submission, reference, "save", "complete")
    config, steps = config_of(dp=2, keep=2), lesson.arguments.get("steps", [])
    empty = submission.complete(dataclasses.replace(config, folder="no-such-folder"))
    require_result("complete", empty, isinstance(empty, list), "a list of step numbers")
    require(not empty, f"before the first save, complete() returns {empty}", "none_complete")
    rename = os.rename

    def slow_rename(*names: Any) -> None:  # other ranks notice if they do not wait for it
        time.sleep(0.3)
        rename(*names)

    if 7 in steps:
        os.rename = os.replace = slow_rename
    if "die" in lesson.arguments:
        write = dcp.FileSystemWriter.write_data

        def write_or_die(self: Any, plan: Any, planner: Any) -> Any:
            if lesson.rank == 1:
                dist.barrier()
                os.kill(os.getpid(), signal.SIGKILL)
            future = write(self, plan, planner)
            future.wait()
            dist.barrier()
            return future

        dcp.FileSystemWriter.write_data = write_or_die
    state = reference.training_state(*new_run(config), 0) if steps else {}
    for step in steps:
        state["step"] = torch.tensor(step)
        submission.save(config, state)
    found = submission.complete(config)
    are_numbers = all(isinstance(step, int) for step in found)
    what = f"complete() returns {found}, and not a list of ints"
    require(are_numbers, what, "steps_sorted")
    lesson.fact("complete", found)
    if not steps:
        lesson.fact("entries", len(os.listdir(config.folder)))
    if "one" in lesson.arguments:
        config = config_of(keep=1)
        submission.save(config, reference.training_state(*new_run(config), 12))
        lesson.fact("one", submission.complete(config))


# --- step 9: resuming ---------------------------------------------------------------------

RESTORED = {"model": "resume_model", "optimizer": "resume_moments", "stream": "resume_stream"}
# hashes and files of the checkpoint that the finished program has saved. It is saved only once
checkpoint: list[tuple[dict, dict[Path, bytes]]] = []


@LAB.trial(9, "resume on any mesh", "parameters, moments and the place in the data are "
           "restored", uses="load", world_sizes=(2, 4), symmetric=False)  # fmt: skip
def resuming(workspace):
    saved_mesh = {"dp": 2, "tp": 2}
    if not checkpoint:
        group = workspace.group(4, mesh=saved_mesh, replicas=[0, 0, 1, 1])
        hashes = group.facts("digest")[0]
        paths = [path for path in workspace.folder.rglob("*") if path.is_file()]
        files = {path.relative_to(workspace.folder): path.read_bytes() for path in paths}
        checkpoint.append((hashes, files))
    hashes, files = checkpoint[0]
    for name, content in files.items():
        (workspace.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace.folder / name).write_bytes(content)
    for world, mesh in ((4, saved_mesh), (2, {"tp": 2}), (2, {"pp": 2})):
        workspace.group(world, mesh=mesh, saved=hashes)
        yield f"every bit comes back as {shape(mesh)}"


@resuming.probe
def _(submission, reference, lesson):
    combine_functions(submission, reference, "load")
    arguments, rank = lesson.arguments, lesson.rank
    config = config_of(**arguments["mesh"])
    if "saved" not in arguments:
        model, optimizer, stream = parts = new_run(config)
        for step in (1, 2):
            reference.accumulate(config, model, stream.next(arguments["replicas"][rank]))
            optimizer.step()
            optimizer.zero_grad()
            reference.save(config, reference.training_state(*parts, step))
        lesson.fact("digest", digest(reference.training_state(*parts, 2)))
        return
    parts = new_run(dataclasses.replace(config, seed=5))
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
    require_result("load", step, isinstance(step, (int, torch.Tensor)), "a step number")
    step = int(step)
    found = digest(reference.training_state(*parts, 2))
    for part, hint in RESTORED.items():
        what = f"loaded as {shape(arguments['mesh'])}, the {part} of rank {rank} has wrong bits"
        for key, value in found[part].items():
            right = value == arguments["saved"][part].get(key)
            require(right, f"{what}: {key or 'the generator'}", hint)
    what = f"load returned {step} on rank {rank}, but the checkpoint is that of step 2"
    require(step == 2, what, "resume_step")


# --- step 10: the whole run ---------------------------------------------------------------

# torchrun forks its ranks, so it imports the modules that all ranks need
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
BOX = {"pp": 2, "dp": 2, "tp": 2, "steps": 3}  # this run is only compared with one process


def world_of(run: dict[str, Any]) -> int:
    """Return the number of ranks of a run."""
    return math.prod(run.get(axis, 1) for axis in AXES)


STEP = re.compile(r"^step +(\d+)/", re.M)


def text_of(path: Path) -> str:
    """Return the text of a file, or "" if the file does not exist."""
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kill_and_resume(
    workspace: Workspace, undisturbed: list[list[float]], chance: random.Random, run: dict = RUN
) -> int:
    """Kill a rank of a torchrun run at a random moment, and return the number of lost steps.

    A step is lost if it was complete and had to be computed again. The moment is later than the
    first checkpoint. A program that starts again without a checkpoint therefore loses too many
    steps. `undisturbed` is the history of a run without a killed rank.
    """
    world, (low, high) = world_of(run), (run["every"] + 1, run["steps"] - 2)
    victim, at, pause = chance.randrange(world), chance.randint(low, high), chance.random() / 10
    folder, log, killed = workspace.folder / "killed", workspace.folder / "said.txt", []
    for name, text in (("torchrun.py", TORCHRUN), ("drive.py", DRIVE)):
        (workspace.folder / name).write_text(text)
    for path in (log, *workspace.folder.glob("life-*.json")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

    def watch(_: dict[int, int]) -> None:
        steps = STEP.findall(text_of(log)) if not killed else []
        if steps and int(steps[-1]) >= at:
            time.sleep(pause)  # so that the rank dies during a step, an update or a save
            with contextlib.suppress(OSError):
                os.kill(int(text_of(workspace.folder / f"rank-{victim}")), signal.SIGKILL)
                killed.append(victim)

    start = "fork" if LINUX else "spawn"
    torchrun = ("torchrun.py", f"--nproc-per-node={world}", "--max-restarts=3", "--run-path",
                f"--start-method={start}", workspace.folder / "drive.py")  # fmt: skip
    config = json.dumps(FLAT | run | {"folder": "killed"})
    result = workspace.run("python", *torchrun, workspace.path, config, limit=120, watch=watch,
                    OMP_NUM_THREADS="1")  # fmt: skip
    lives, output = sorted(workspace.folder.glob("life-*.json")), text_of(log)
    if not killed and not result.status:
        require(STEP.search(output), "the run ended, but it printed no step", "untold")
        # the run ended before the moment at which to kill a rank
        return kill_and_resume(workspace, undisturbed, chance, run)
    what = f"rank {victim} was killed, and torchrun ended with status {result.status}"
    require(lives and not result.status, what, "not_recovered")
    history = json.loads(text_of(lives[-1]))
    first = history[0][0] if history else run["steps"] + 1
    before = output.rpartition("life ")[0]  # the output of all lives except the last one
    reached = max(map(int, STEP.findall(before)), default=0)
    lost = reached + 1 - first
    what = f"the run had reached step {reached}, and it continued with step {first:.0f}"
    require(lost <= run["every"], what, "lost_steps")
    right = history == undisturbed[len(undisturbed) - len(history) :]
    what = f"from step {first:.0f} on, the losses differ from those of an undisturbed run"
    require(right, what, "after_kill")
    return int(max(0, lost))


@LAB.trial(
    10, "the whole run, and a killed rank", "the run survives a rank", uses="train join",
    world_sizes=(2, 8), symmetric=False, needs=(1, 2, 3, 4, 5, 6, 8, 9),
)  # fmt: skip
def whole_run(workspace, run=RUN, box=BOX):
    for number, config in enumerate((box, run)):
        config = config | {"folder": f"own-{number}"}
        group = workspace.group(world_of(config), config=config, truth=True)
        true = group.ranks[0].facts["truth"]
        for history in group.facts("history"):
            what = f"the run has {len(history)} steps, and should have {len(true)}"
            require(len(history) == len(true), what, "not_truth")
            for (step, loss, norm), (true_loss, true_norm) in zip(history, true, strict=True):
                what = f"step {step:.0f}: loss {loss:.4f}, norm {norm:.4f}; one process has "
                what += f"{true_loss:.4f} and {true_norm:.4f}"
                right = isclose(loss, true_loss, 1e-3) and isclose(norm, true_norm, 1e-2)
                require(right, what, "not_truth")
        yield f"the losses and norms of one process as {shape(config)}"
    undisturbed, seconds = history, sum(group.facts("seconds"))

    def measure(folder: str, **arguments: Any) -> float:
        """Run again and return the processor seconds of a step, summed over all ranks."""
        group = workspace.group(world_of(run), config=run | {"folder": folder}, **arguments)
        return sum(group.facts("seconds"))

    finished_seconds = measure("finished", finished=True)
    if seconds > 1.5 * finished_seconds:  # the machine may be busy, so measure both again
        seconds = min(seconds, measure("own-2"))
        finished_seconds = min(finished_seconds, measure("finished-2", finished=True))
    what = f"a step uses {seconds:.3f} s of processor time, and a step of the finished program "
    require(seconds <= 1.5 * finished_seconds, f"{what}{finished_seconds:.3f} s", "slow")
    yield "throughput is that of the finished program"
    lost = kill_and_resume(workspace, undisturbed, random.Random(), run)
    yield f"a rank was killed; ≈{lost} steps were computed again, and no loss differs in a bit"


@whole_run.probe
def _(submission, reference, lesson):
    use_same_sends()
    arguments, submission.text = lesson.arguments, reference.text
    module = reference if arguments.get("finished") else submission
    config = module.Config(**FLAT | arguments["config"])
    ends = [time.process_time()]
    register_optimizer_step_post_hook(lambda *_: ends.append(time.process_time()))
    history = module.train(config, CPU, lambda line: None)
    # The first quartile is the time of a quick step. The first steps fill DTensor's caches,
    # some steps save a checkpoint, and others are disturbed by the machine.
    steps = [b - a for a, b in itertools.pairwise(ends)]
    lesson.fact("seconds", statistics.quantiles(steps)[0] if len(steps) > 1 else 0.0)
    lesson.fact("history", history)
    if arguments.get("truth") and lesson.rank == 0:
        lesson.fact("truth", truth(config))
