"""The steps of the capstone: what each must do, how it is measured, the hint for each symptom.

Each of the first nine steps is graded on its own: all but the functions of that step is taken
from the finished program. The tenth takes the learner's whole file, and kills a rank of it. The
truth is a plain loop in one process, without a mesh, FSDP or DTensor.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import time
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # optimizers import it: once here, not in every process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.fx.experimental.symbolic_shapes  # backward(gradient) would, in every process
from graders.runner import LINUX, Bench, Group, Lesson, Step, Trial, Wrong
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HINTS = {
    "rows_shape": "A row has one position more than the model sees: inputs are all but the "
    "last, targets all but the first. Return [batch / dp, s + 1].",
    "rows_same": "All replicas return the same rows, so all but one of them work for nothing: "
    "where does `replica` enter?",
    "rows_other": "The replicas' rows together must be the batch that one process draws. "
    "Every replica draws all positions from a generator in the same state, and keeps its part.",
    "mesh_names": 'The mesh has the dimensions "pp", "dp" and "tp", in this order: pass them '
    "as mesh_dim_names.",
    "mesh_order": "The last dimension changes fastest. Ranks of one tp group are neighbours, "
    "for they share the fastest links; stages are farthest apart.",
    "tp_not_cut": "A matrix is whole on every rank of the tp group. q, k, v, up and the head "
    "are cut by columns; out, down and the embedding by rows.",
    "tp_norms": "A norm sees the positions of its rank alone, so its gradient is a part of the "
    "sum. SequenceParallel tells DTensor so, and the parts are added up.",
    "tp_layouts": "What comes out of one piece is not what the next expects. Between blocks a "
    "tensor is cut by positions, Shard(1); attention, MLP and head gather it, and rows scatter "
    "their sum: output_layouts=Shard(1).",
    "not_sharded": "Parameters are whole over dp: fully_shard(module, mesh=…) must be called "
    "for the module, and its result returned.",
    "whole_mesh": "Without a mesh, fully_shard cuts over all ranks, stages and tp included. "
    'Give it mesh["dp"].',
    "param_dtype": "Products are not computed in the run's precision. MixedPrecisionPolicy has "
    "param_dtype for it, which is config.dtype.",
    "reduce_dtype": "Gradients are added up over dp in 16 bits, and small ones are lost. "
    "reduce_dtype=torch.float32.",
    "not_divided": "The gradients of all micro-batches are added up: divide each loss by their "
    "number before backward.",
    "over_dp": "FSDP has divided the gradients by dp already. Divide by the number of "
    "micro-batches alone.",
    "rows_lost": "The gradients are not those of all rows. Every micro-batch goes forward and "
    "backward, and nothing is set to zero between them.",
    "loss_value": "The gradients are right and the returned loss is not the mean over all rows "
    "of this replica.",
    "norm_local": "This is the norm of what this rank holds. Add the squares up over all ranks "
    "before the root.",
    "norm_copies": "What tp ranks hold copies of counts once for each copy. Divide its squares "
    "by the number of copies, or let one of them count.",
    "norm_of_norms": "Norms cannot be added, squares can: the root comes after the all-reduce.",
    "not_clipped": "The norm is right, and the gradients are not scaled by limit / norm.",
    "clip_grows": "A gradient below the limit was made longer. Scale by limit / norm only if "
    "that is below 1.",
    "stage_layers": "Every layer belongs to exactly one stage, layers / pp of them in a row.",
    "pp_group": 'A stage talks to its neighbours in its own pipeline: pass it as group='
    'mesh["pp"].get_group(), or all replicas and shards mix.',
    "pp_stage": "A stage's number is its place in the pp dimension, and not its rank.",
    "pp_scale": "The gradients are not those of the mean. The schedule divides by the number "
    "of micro-batches, which is config.micro_batches, if scale_grads is left as it is.",
    "gpipe": "All forwards come before all backwards, and every micro-batch is live at once. "
    "Schedule1F1B keeps p - i of them in stage i.",
    "budget_keys": 'Return a dict of int: "state", "gathered", "kept", "block" and "logits".',
    "state": "Between the steps a rank holds 4 bytes of weight and 8 of moments for each of "
    "its parameters, and 4 of gradient after backward. What is cut by tp is cut by dp as well.",
    "gathered": "Without a pipeline, at most two blocks are whole at once, and the ends; with "
    "it, the whole stage, from the first backward to the last. Count gradients, too.",
    "kept": "With recomputation a block keeps its input alone, and each rank has s / tp "
    "positions of it. Stage i of p has p - i micro-batches live.",
    "too_small": "The run needed more than the budget allows. Look at the parts: what is whole "
    "for a moment, what backward makes anew, what the logits and their gradient take.",
    "too_large": "The budget is so wide that a run without sharding or recomputation would "
    "pass, too. It must come from the formulas, and stay below twice what is needed.",
    "no_dcp": "The ranks' parts are not written by dcp.save. It writes what each has, so that "
    "any mesh can read it, and returns when all have written.",
    "half_counted": "A checkpoint of which a rank had not written its part counts as complete. "
    "Give it its final name only when dcp.save has returned, and go by names.",
    "overwritten": "A rank that died while saving took the older checkpoint along. Write every "
    "checkpoint to a folder of its own.",
    "none_complete": "A finished save is not listed by complete(): it must have its final name "
    "when save returns.",
    "not_dropped": "Old checkpoints stay for ever: keep the newest `config.keep`, and drop an "
    "old one only after the new one has its name.",
    "left_over": "Each save leaves something beside the checkpoints. A copy takes time, a rank "
    "can die in it: give the folder its name by rename, which is one operation.",
    "steps_sorted": "Step 10 comes after step 9: sort by number, not by name.",
    "resume_step": "load must return the step that the checkpoint was saved after, or training "
    "repeats or leaves out steps.",
    "resume_model": "The parameters are not those of the newest complete checkpoint. dcp.load "
    "fills the state dict; set_state_dict puts it into the model.",
    "resume_moments": "The parameters are right and Adam's moments are not. Pass the "
    "optimizer's state to set_state_dict.",
    "resume_stream": "The data begin again at the first batch: give the stream's generator its "
    "state back.",
    "not_truth": "Every part passes on its own and the whole run does not have the losses of "
    "one process. Is there code of yours outside the marked places?",
    "not_recovered": "A rank was killed and the run did not come to its last step. Start it "
    "with torchrun --max-restarts=3 and --die=8:1, and read what the next life says.",
    "untold": "The run tells of no step, so that nobody can watch it. Call say with the line "
    '"step 5/15 …" of each step that config.log asks for.',
    "lost_steps": "More steps were computed again than lie between two checkpoints. The next "
    "life must begin at the newest complete one.",
    "after_kill": "The run survived and its losses are not those of an undisturbed run. What "
    "is different after load?",
    "slow": "The finished program needs far less time for the same steps in the same run. "
    "Look for work that is done twice, or for a collective in a loop.",
    "other": "The numbers fit no common mistake. Try one rank first, then two.",
}  # fmt: skip

FLAT = {
    "layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64, "pp": 1, "dp": 1,
    "tp": 1, "steps": 4, "batch": 8, "micro": 2, "lr": 3e-3, "warmup": 2, "clip": 1.0,
    "precision": "fp32", "recompute": True, "compile": False, "seed": 0, "log": 0,
    "folder": "checkpoints", "every": 0, "keep": 2,
}  # fmt: skip
CPU = torch.device("cpu")


# --- the finished program, and the truth --------------------------------------------------


@functools.lru_cache
def finished() -> ModuleType:
    """The program with its solutions."""
    path = Path(__file__).resolve().parent.parent / "capstone.py"
    spec = importlib.util.spec_from_file_location("finished_capstone", path)
    module = sys.modules["finished_capstone"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


finished().text()  # once here, not in every process


def free_sends() -> None:
    """Send unrecorded: pipelining asks for the functions of torch themselves."""
    dist.isend, dist.irecv = distributed_c10d.isend, distributed_c10d.irecv


def graft(lesson: Lesson, *own: str) -> tuple[ModuleType, ModuleType]:
    """Put these of the learner's functions into the finished program; return both programs."""
    free_sends()
    module, lab = lesson.module, finished()
    for name, value in list(vars(lab).items()):
        if getattr(value, "__module__", None) != lab.__name__ and not name.isupper():
            continue
        if name in own:
            setattr(lab, name, getattr(module, name))
        else:
            setattr(module, name, value)
    return module, lab


def config_of(**changes: Any) -> Any:
    return finished().Config(**FLAT | changes)


class OneProcess:
    """A mesh of one rank, without a group."""

    def __getitem__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1)


def plain(config: Any) -> nn.Module:
    """The whole model as one process has it: no DTensor, no hooks."""
    lab, one = finished(), dataclasses.replace(config, pp=1, dp=1, tp=1)
    kept = lab.shard, lab.cut, lab.layers_of_stage
    lab.shard, lab.cut = (lambda module, *_: module), (lambda module, *_: module)
    lab.layers_of_stage = lambda config, _: range(config.layers)
    try:
        return lab.build(one, OneProcess(), CPU)
    finally:
        lab.shard, lab.cut, lab.layers_of_stage = kept


def rows_of(config: Any, count: int = 1) -> list[torch.Tensor]:
    """The first global batches, by the rule that the text of the program states."""
    generator = torch.Generator().manual_seed(config.seed)
    text, batches = finished().text(), []
    for _ in range(count):
        last = len(text) - config.sequence - 1
        places = torch.randint(last, (config.batch,), generator=generator)
        batches.append(text[places[:, None] + torch.arange(config.sequence + 1)])
    return batches


def truth(config: Any) -> list[list[float]]:
    """[loss, norm] of each step in one process."""
    lab, model = finished(), plain(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    history = []
    for step, rows in enumerate(rows_of(config, config.steps), start=1):
        optimizer.param_groups[0]["lr"] = lab.rate(config, step)
        loss = lab.loss_of(model(rows[:, :-1]), rows[:, 1:])
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


def ratio(ours: torch.Tensor, true: torch.Tensor) -> float:
    """By what our tensor is a multiple of the true one; nan if it is none."""
    if ours.shape != true.shape:
        return math.nan
    factor = ((ours * true).sum() / true.square().sum()).item()
    return round(factor, 4) if torch.allclose(ours, factor * true, 1e-3, 1e-6) else math.nan


def close(a: float, b: float, tolerance: float = 1e-4) -> bool:
    return abs(a - b) <= tolerance * abs(b)


def gradient_ratios(model: nn.Module, alone: nn.Module) -> dict[str, float]:
    """For each of this rank's parameters, its gradient as a multiple of the true one."""
    truths = dict(alone.named_parameters())
    return {
        name: ratio(whole(p.grad), truths[name].grad) if p.grad is not None else 0.0
        for name, p in model.named_parameters()
    }


def mesh_of(lab: ModuleType, config: Any) -> Any:
    return lab.make_mesh(config, "cpu")


# --- step 1: data -------------------------------------------------------------------------


def probe_rows(lesson: Lesson) -> None:
    module, _ = graft(lesson, "Stream")
    for dp in (1, 2, 4):
        config = config_of(dp=dp)
        streams = [module.Stream(config) for _ in range(dp)]
        for number, true in enumerate(rows_of(config, 2)):
            parts = [stream.next(r) for r, stream in enumerate(streams)]
            shapes = {tuple(part.shape) for part in parts}
            if shapes != {(config.batch // dp, config.sequence + 1)}:
                found = "shape " + ", ".join("×".join(map(str, s)) for s in shapes)
            elif dp > 1 and torch.equal(parts[0], parts[1]):
                found = "same"
            elif torch.equal(torch.cat(parts), true):
                found = "right"
            else:
                found = "other"
            lesson.fact(f"dp = {dp}, batch {number + 1}", found)


def judge_rows(group: Group, right: Any) -> None:
    for name, found in group.ranks[0].facts.items():
        if found.startswith("shape"):
            raise Wrong(f"{name}: the rows have the {found}", HINTS["rows_shape"])
        if found != "right":
            hint = "rows_same" if found == "same" else "rows_other"
            raise Wrong(f"{name}: the rows are not those of the global batch", HINTS[hint])


# --- step 2: the mesh ---------------------------------------------------------------------

BOXES = {4: [(1, 2, 2), (2, 1, 2), (2, 2, 1)], 8: [(2, 2, 2), (1, 2, 4)]}


def probe_mesh(lesson: Lesson) -> None:
    module, _ = graft(lesson, "make_mesh")
    for pp, dp, tp in BOXES[lesson.world]:
        mesh = module.make_mesh(config_of(pp=pp, dp=dp, tp=tp), "cpu")
        lesson.fact("names", list(mesh.mesh_dim_names or []))
        if list(mesh.mesh_dim_names or []) != ["pp", "dp", "tp"]:
            return
        lesson.fact(f"{pp} × {dp} × {tp}", mesh.mesh.tolist())


def judge_mesh(group: Group, right: Any) -> None:
    for rank, names in enumerate(group.facts("names")):
        if names != ["pp", "dp", "tp"]:
            raise Wrong(f"rank {rank} has a mesh of {names}", HINTS["mesh_names"])
    for box in BOXES[group.world]:
        name = " × ".join(map(str, box))
        expected = torch.arange(group.world).view(box).tolist()
        for found in group.facts(name):
            if found != expected:
                what = f"pp × dp × tp = {name}: the ranks lie as {found}, not {expected}"
                raise Wrong(what, HINTS["mesh_order"])


# --- step 3: tensor parallelism -----------------------------------------------------------


def probe_cut(lesson: Lesson) -> None:
    _, lab = graft(lesson, "cut")
    config = config_of(tp=lesson.world)
    lab.shard = lambda module, *_: module
    model, alone = lab.build(config, mesh_of(lab, config), CPU), plain(config)
    (rows,) = rows_of(config)
    for name, p in model.named_parameters():
        if "norm" not in name:
            lesson.fact(f"part {name}", p.numel() // local(p).numel())
    logits, true = model(rows[:, :-1]), alone(rows[:, :-1])
    lesson.fact("logits", list(logits.shape) == list(true.shape))
    if logits.shape != true.shape:
        return
    lesson.fact("forward", ratio(local(logits), true))
    lab.loss_of(logits, rows[:, 1:]).backward()
    lab.loss_of(true, rows[:, 1:]).backward()
    lesson.fact("gradients", gradient_ratios(model, alone))


def judge_cut(group: Group, right: Any) -> None:
    for rank in group.ranks:
        for name, parts in rank.facts.items():
            if name.startswith("part ") and parts != group.world:
                raise Wrong(f"{name[5:]} is not cut in {group.world}", HINTS["tp_not_cut"])
    if not all(group.facts("logits")):
        raise Wrong("the logits have another shape", HINTS["tp_layouts"])
    for number, rank in enumerate(group.ranks):
        if rank.facts["forward"] != 1:
            raise Wrong(f"the logits of rank {number} are wrong", HINTS["tp_layouts"])
        for name, factor in rank.facts["gradients"].items():
            if not close(factor, 1, 1e-3):
                hint = HINTS["tp_norms" if "norm" in name else "tp_layouts"]
                raise Wrong(f"the gradient of {name} on rank {number} is wrong", hint)


# --- step 4: sharding ---------------------------------------------------------------------


def probe_shard(lesson: Lesson) -> None:
    _, lab = graft(lesson, "shard")
    config = config_of(pp=2, dp=2, precision="bf16", batch=8)
    mesh = mesh_of(lab, config)
    model = lab.build(config, mesh, CPU)
    block = next(iter(model.blocks.values()))
    if type(block).__name__ == "Block" or not all(
        isinstance(p, DTensor) for p in model.parameters()
    ):
        lesson.fact("sharded", False)
        return
    total = sum(p.numel() for p in model.parameters())
    lesson.fact("part", round(total / sum(local(p).numel() for p in model.parameters()), 2))
    seen: dict[str, str] = {}
    block.mlp.up.register_forward_hook(lambda *a: seen.update(product=str(a[2].dtype)))

    def watched(real: Any) -> Any:
        def reduce_scatter(*arguments: Any, **options: Any) -> Any:
            tensors = [x for x in (*arguments, *options.values()) if hasattr(x, "dtype")]
            seen["sum"] = str(tensors[0].dtype)
            return real(*arguments, **options)

        return reduce_scatter

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # the second from 2.13 on
        if hasattr(dist, name):
            setattr(dist, name, watched(getattr(dist, name)))
    stage = mesh["pp"].get_local_rank()
    x = torch.randn(2, config.sequence, config.hidden, requires_grad=True)
    entry = rows_of(config)[0][:2, :-1] if stage == 0 else x
    model(entry).float().square().mean().backward()
    lesson.fact("seen", seen)


def judge_shard(group: Group, right: Any) -> None:
    if False in group.facts("sharded"):
        raise Wrong("parameters are no DTensors over dp", HINTS["not_sharded"])
    for rank, part in enumerate(group.facts("part")):
        if part != 2:
            what = f"rank {rank} holds a {part:g}th of its stage with dp = 2"
            raise Wrong(what, HINTS["whole_mesh" if part > 2 else "not_sharded"])
    for seen in group.facts("seen"):
        if seen.get("product") != "torch.bfloat16":
            what = f"products are in {seen.get('product')} with bf16"
            raise Wrong(what, HINTS["param_dtype"])
        if seen.get("sum") != "torch.float32":
            raise Wrong(f"gradients are added up in {seen.get('sum')}", HINTS["reduce_dtype"])


# --- step 5: accumulation and clipping ----------------------------------------------------


def probe_step(lesson: Lesson) -> None:
    _, lab = graft(lesson, "accumulate", "clip")
    config = config_of(dp=2, tp=lesson.world // 2)
    mesh = mesh_of(lab, config)
    model, alone = lab.build(config, mesh, CPU), plain(config)
    replica = mesh["dp"].get_local_rank()
    rows = rows_of(config)[0]
    loss = lab.accumulate(config, model, rows.chunk(2)[replica])
    lab.loss_of(alone(rows[:, :-1]), rows[:, 1:]).backward()
    lesson.fact("gradients", gradient_ratios(model, alone))
    own = rows.chunk(2)[replica]
    with torch.no_grad():
        true = lab.loss_of(alone(own[:, :-1]), own[:, 1:])
    lesson.fact("loss", close(float(loss), float(true)))

    # the norm, of gradients that are right whatever was found above
    truths = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        p.grad = p.grad if p.grad is not None else torch.zeros_like(p)
        if (factor := ratio(whole(p.grad), truths[name].grad)) and not math.isnan(factor):
            local(p.grad).div_(factor)
        if "norm" in name:  # what tp ranks hold copies of: make it count
            local(p.grad).mul_(50)
            truths[name].grad.mul_(50)
    shards = [local(p.grad).double() for p in model.parameters()]
    square = sum(s.square().sum() for s in shards)
    copies, over_norms = square.clone(), square.sqrt()
    dist.all_reduce(copies)
    dist.all_reduce(over_norms)
    candidates = {
        "right": nn.utils.get_total_norm([p.grad for p in alone.parameters()]).item(),
        "local": square.sqrt().item(),
        "copies": copies.sqrt().item(),
        "norms": over_norms.item(),
    }
    for case, limit in (("tight", 0.5), ("loose", 100.0)):
        before = [s.clone() for s in shards]
        for p, s in zip(model.parameters(), before, strict=True):
            local(p.grad).copy_(s)
        norm = float(lab.clip(dataclasses.replace(config, clip=limit), model))
        names = [name for name, value in candidates.items() if close(norm, value, 1e-3)]
        lesson.fact(f"{case} norm", names[0] if names else f"{norm:.4f}")
        scale = min(1, limit / candidates["right"])
        after = [local(p.grad).double() for p in model.parameters()]
        scaled = all(
            torch.allclose(a, b * scale, 1e-3, 1e-7) for a, b in zip(after, before, strict=True)
        )
        lesson.fact(f"{case} scaled", scaled)


def judge_step(group: Group, right: Any) -> None:
    micro = config_of(dp=2).micro_batches
    for number, rank in enumerate(group.ranks):
        for name, factor in rank.facts["gradients"].items():
            if not close(factor, 1, 1e-3):
                hint = {float(micro): "not_divided", 0.5: "over_dp"}.get(factor, "rows_lost")
                what = f"on rank {number} the gradient of {name} is the true one × {factor}"
                raise Wrong(what, HINTS[hint])
        if not rank.facts["loss"]:
            raise Wrong(f"the loss that rank {number} returns is wrong", HINTS["loss_value"])
    right("gradients and losses of all micro-batches")
    hints = {"local": "norm_local", "copies": "norm_copies", "norms": "norm_of_norms"}
    for number, rank in enumerate(group.ranks):
        found = rank.facts["tight norm"]
        if found != "right":
            what = f"the norm on rank {number} is wrong ({found})"
            raise Wrong(what, HINTS[hints.get(found, "other")])
    for number, rank in enumerate(group.ranks):
        if not rank.facts["tight scaled"]:
            raise Wrong(f"gradients of rank {number} are not clipped", HINTS["not_clipped"])
        if not rank.facts["loose scaled"]:
            what = f"gradients of rank {number} below the limit were changed"
            raise Wrong(what, HINTS["clip_grows"])


# --- step 6: the pipeline -----------------------------------------------------------------


def probe_pipeline(lesson: Lesson) -> None:
    _, lab = graft(lesson, "layers_of_stage", "make_schedule")
    config = config_of(layers=4, pp=2, dp=lesson.world // 2, micro=1)
    layers = [list(map(int, lab.layers_of_stage(config, stage))) for stage in range(2)]
    lesson.fact("layers", layers)
    if layers != [[0, 1], [2, 3]]:
        return
    mesh = mesh_of(lab, config)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    model, alone = lab.build(config, mesh, CPU), plain(config)
    live = {"now": 0, "peak": 0}

    def entered(_: Any, __: Any, output: torch.Tensor) -> None:
        if torch.is_grad_enabled() and output.requires_grad:
            live["now"] += 1
            live["peak"] = max(live["peak"], live["now"])
            output.register_hook(lambda _: live.update(now=live["now"] - 1))

    model.register_forward_hook(entered)
    rows = rows_of(config)[0]
    own = rows.chunk(config.dp)[replica]
    schedule = lab.make_schedule(config, model, mesh, CPU)
    lab.run_pipeline(config, schedule, own, stage)  # the first asks for shapes beforehand
    model.zero_grad()
    live.update(now=0, peak=0)
    loss = lab.run_pipeline(config, schedule, own, stage)
    lab.loss_of(alone(rows[:, :-1]), rows[:, 1:]).backward()
    lesson.fact("gradients", gradient_ratios(model, alone))
    lesson.fact("stage", stage)
    lesson.fact("peak", live["peak"])
    lesson.fact("micro", config.micro_batches)
    with torch.no_grad():
        true = lab.loss_of(alone(own[:, :-1]), own[:, 1:])
    lesson.fact("loss", stage == 0 or close(float(loss), float(true)))


def judge_pipeline(group: Group, right: Any) -> None:
    layers = group.ranks[0].facts["layers"]
    if layers != [[0, 1], [2, 3]]:
        raise Wrong(f"of 4 layers the 2 stages hold {layers}", HINTS["stage_layers"])
    for number, rank in enumerate(group.ranks):
        for name, factor in rank.facts["gradients"].items():
            if not close(factor, 1, 1e-3):
                what = f"on rank {number} the gradient of {name} is the true one × {factor}"
                raise Wrong(what, HINTS["pp_scale"])
        if not rank.facts["loss"]:
            raise Wrong(f"the loss of rank {number} is wrong", HINTS["pp_scale"])
    right("losses and gradients of one process")
    for rank in group.ranks:
        live, expected = rank.facts["peak"], 2 - rank.facts["stage"]
        if live > expected:
            what = f"stage {rank.facts['stage']} has {live} micro-batches live, not {expected}"
            raise Wrong(what, HINTS["gpipe"])


# --- step 7: memory -----------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Bytes of the live storages that operators have returned, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.peak = 0
        self.sizes: dict[int, tuple[Any, int]] = {}

    def __enter__(self) -> "Memory":
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
            if storage._cdata in self.sizes:
                self.note(storage, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_and_note  # FSDP frees gathered units by it
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

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
        self.used += size - self.sizes.get(key, (None, 0))[1]
        self.peak = max(self.peak, self.used)
        self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size

    def forget(self, key: int) -> None:
        self.used -= self.sizes.pop(key)[1]


CASES = [{"dp": 4}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}]
PARTS = ("state", "gathered", "kept", "block", "logits")


def memory_of(lab: ModuleType, config: Any) -> tuple[int, int]:
    """Bytes of weights, gradients and moments of this rank, and the most of a step."""
    mesh = mesh_of(lab, config)
    stage, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    rows = rows_of(config)[0].chunk(config.dp)[replica].clone()
    with Memory() as memory:
        model = lab.build(config, mesh, CPU)
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


def memory_config(**mesh: int) -> Any:
    size = {"layers": 4, "hidden": 64, "sequence": 64, "batch": 8, "micro": 2}
    return config_of(**size, **mesh)


def probe_budget(lesson: Lesson) -> None:
    if "measure" in lesson.scene:  # of the finished program
        free_sends()
        found = [memory_of(finished(), memory_config(**mesh)) for mesh in CASES]
        lesson.fact("needed", found)
        return
    module, _ = graft(lesson, "budget")
    told: dict[str, list[dict[str, int]]] = {"told": [], "ours": []}
    for mesh in CASES:
        config = memory_config(**mesh)
        for stage in range(config.pp):
            found = module.budget(config, stage)
            good = isinstance(found, dict) and set(found) == set(PARTS)
            lesson.fact(
                "keys", good and all(isinstance(value, int) for value in found.values())
            )
            if not good:
                return
            told["told"].append(found)
            told["ours"].append(FINISHED_BUDGET(config, stage))
    for name, found in told.items():
        lesson.fact(name, found)


FINISHED_BUDGET = finished().budget
needed: list[list[list[int]]] = []  # state and peak, by rank and case: measured once


def judge_budget(bench: Bench, right: Any) -> None:
    facts = bench.group(1).ranks[0].facts
    if not facts["keys"]:
        raise Wrong("budget does not return the five parts", HINTS["budget_keys"])
    if not needed:
        needed.extend(bench.group(4, measure=True).facts("needed"))
    ratios, first = [], 0
    for number, mesh in enumerate(CASES):
        config = memory_config(**mesh)
        name = f"pp × dp × tp = {config.pp} × {config.dp} × {config.tp}"
        for rank, (state, peak) in enumerate(found[number] for found in needed):
            place = first + rank // (4 // config.pp)
            told, ours = facts["told"][place], facts["ours"][place]
            if told["state"] != state:
                what = f"{name}: rank {rank} holds {state:,} bytes of state, "
                raise Wrong(f"{what}the budget says {told['state']:,}", HINTS["state"])
            total = sum(told.values())
            ratios.append(total / peak)
            if 1 <= ratios[-1] < 2:
                continue
            small = ratios[-1] < 1
            off = [
                part
                for part in ("gathered", "kept")
                if (told[part] < 0.6 * ours[part] if small else told[part] > 1.7 * ours[part])
            ]
            hint = off[0] if off else "too_small" if small else "too_large"
            what = f"{name}: rank {rank} needed ≈{peak / 1024:,.0f} KiB, "
            raise Wrong(f"{what}the budget allows {total / 1024:,.0f} KiB", HINTS[hint])
        first += config.pp
    low, high = min(ratios), max(ratios)
    right(f"the budgets are ≈{low:.2f} to ≈{high:.2f} times what was needed")


# --- step 8: checkpoints ------------------------------------------------------------------


def digest(state: dict[str, Any]) -> dict[str, dict[str, str]]:
    """A hash of every bit of each tensor of a training state that this rank's stage has."""
    found: dict[str, dict[str, str]] = {}
    for part, value in state.items():
        items = value.items() if isinstance(value, dict) else [("", value)]
        found[part] = {
            name: hashlib.sha256(whole(tensor).detach().numpy().tobytes()).hexdigest()[:16]
            for name, tensor in sorted(items, key=lambda item: item[0])
            if isinstance(tensor, torch.Tensor) and "param_groups" not in name
        }
    return found


def begun(lab: ModuleType, config: Any) -> tuple[Any, ...]:
    """Model, optimizer and stream of a run that has not trained yet."""
    model = lab.build(config, mesh_of(lab, config), CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    return model, optimizer, lab.Stream(config)


def probe_save(lesson: Lesson) -> None:
    module, lab = graft(lesson, "save", "complete")
    config, scene = config_of(dp=2, keep=2), lesson.scene
    if "list" in scene:
        lesson.fact("complete", list(map(int, module.complete(config))))
        lesson.fact("entries", len(os.listdir(config.folder)))
        return
    state = lab.training_state(*begun(lab, config), 0)
    if "die" in scene:
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
    for step in scene["steps"]:
        state["step"] = torch.tensor(step)
        module.save(config, state)
    lesson.fact("complete", list(map(int, module.complete(config))))


def judge_save(bench: Bench, right: Any) -> None:
    found = bench.group(2, steps=[7]).facts("complete")
    if found != [[7]] * 2:
        raise Wrong(f"after a save of step 7 complete() is {found[0]}", HINTS["none_complete"])
    right("a finished checkpoint is listed")
    dying = bench.group(2, dies=True, steps=[8], die=True)
    if dying.ranks[1].status != -signal.SIGKILL:
        raise Wrong("save does not write by dcp.save", HINTS["no_dcp"])
    facts = bench.group(1, list=True).ranks[0].facts
    found, entries = facts["complete"], facts["entries"]
    if 8 in found:
        what = f"a rank died while it saved step 8, and complete() is {found}"
        raise Wrong(what, HINTS["half_counted"])
    if found != [7]:
        what = f"a rank died while it saved step 8, and complete() is {found}"
        raise Wrong(what, HINTS["overwritten"])
    right("a save that a rank did not survive leaves the checkpoint before it")
    bench.group(2, steps=[9, 10, 11])
    facts = bench.group(1, list=True).ranks[0].facts
    found = facts["complete"]
    if found != [10, 11]:
        hint = "steps_sorted" if sorted(found) == [10, 11] or 9 in found[-1:] else "not_dropped"
        raise Wrong(f"after 9, 10 and 11, with keep = 2, complete() is {found}", HINTS[hint])
    if (stay := facts["entries"]) > entries + 1:
        what = f"the folder had {entries} entries, and after 9, 10 and 11 it has {stay}"
        raise Wrong(f"{what}, with keep = 2", HINTS["left_over"])


# --- step 9: resuming ---------------------------------------------------------------------


def probe_load(lesson: Lesson) -> None:
    module, lab = graft(lesson, "load")
    scene = lesson.scene
    config = config_of(**scene["mesh"])
    if "save" in scene:
        model, optimizer, stream = parts = begun(lab, config)
        for step in (1, 2):
            lab.accumulate(config, model, stream.next(scene["replicas"][lesson.rank]))
            optimizer.step()
            optimizer.zero_grad()
            lab.save(config, lab.training_state(*parts, step))
    else:
        parts = begun(lab, dataclasses.replace(config, seed=5))
        lesson.fact("step", int(module.load(config, *parts)))
    lesson.fact("digest", digest(lab.training_state(*parts, 2)))


def judge_load(bench: Bench, right: Any) -> None:
    box = {"dp": 2, "tp": 2}
    group = bench.group(4, mesh=box, replicas=[0, 0, 1, 1], save=True)
    saved = group.facts("digest")[0]
    for world, mesh in ((4, box), (2, {"tp": 2}), (2, {"pp": 2})):
        group = bench.group(world, mesh=mesh)
        name = " × ".join(str(mesh.get(axis, 1)) for axis in ("pp", "dp", "tp"))
        for rank in range(world):
            found, step = group.facts("digest")[rank], group.facts("step")[rank]
            for part, hint in (("model", "resume_model"), ("optimizer", "resume_moments"),
                               ("stream", "resume_stream")):  # fmt: skip
                for key, bits in found[part].items():
                    if bits != saved[part].get(key):
                        what = f"loaded as {name}, the {part} of rank {rank} differs in its "
                        raise Wrong(f"{what}bits: {key or 'the generator'}", HINTS[hint])
            if step != 2:
                what = f"load returned {step} on rank {rank}, the checkpoint is of step 2"
                raise Wrong(what, HINTS["resume_step"])
        right(f"every bit comes back as {name}")


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
RUN = {"dp": 4, "micro": 1, "layers": 2, "steps": 10, "every": 3, "log": 1}
BOX = {"pp": 2, "dp": 2, "tp": 2, "steps": 3}  # compared with one process, too


def world_of(run: dict[str, Any]) -> int:
    return math.prod(run.get(axis, 1) for axis in ("pp", "dp", "tp"))


def probe_run(lesson: Lesson) -> None:
    free_sends()
    scene = lesson.scene
    module = finished() if scene.get("finished") else lesson.module
    lesson.module.text = finished().text
    config = module.Config(**FLAT | scene["config"])
    ends = [time.process_time()]
    register_optimizer_step_post_hook(lambda *_: ends.append(time.process_time()))
    history = module.train(config, CPU, lambda line: None)
    # of a quick step: the first fill DTensor's caches, some save, others are disturbed
    steps = [b - a for a, b in itertools.pairwise(ends)]
    lesson.fact("seconds", statistics.quantiles(steps)[0] if len(steps) > 1 else 0.0)
    lesson.fact("history", history)
    if scene.get("truth") and lesson.rank == 0:
        lesson.fact("truth", truth(config))


def judge_run(bench: Bench, right: Any, run: dict = RUN, box: dict = BOX) -> None:
    for number, config in enumerate((box, run)):
        config = config | {"folder": f"own-{number}"}
        own = bench.group(world_of(config), config=config, truth=True)
        true = own.ranks[0].facts["truth"]
        for history in own.facts("history"):
            if len(history) != len(true):
                what = f"the run has {len(history)} steps, and should have {len(true)}"
                raise Wrong(what, HINTS["not_truth"])
            for (step, *ours), (loss, norm) in zip(history, true, strict=True):
                if not (close(ours[0], loss, 1e-3) and close(ours[1], norm, 1e-2)):
                    what = f"step {step:.0f}: loss {ours[0]:.4f}, norm {ours[1]:.4f}; one "
                    what += f"process has {loss:.4f} and {norm:.4f}"
                    raise Wrong(what, HINTS["not_truth"])
        shape = " × ".join(str(config.get(axis, 1)) for axis in ("pp", "dp", "tp"))
        right(f"the losses and norms of one process as {shape}")
    undisturbed, seconds = history, sum(own.facts("seconds"))

    def again(folder: str, **scene: Any) -> float:
        group = bench.group(world_of(run), config=run | {"folder": folder}, **scene)
        return sum(group.facts("seconds"))

    theirs = again("finished", finished=True)
    if seconds > 1.5 * theirs:  # a busy machine looks the same: both once more
        seconds = min(seconds, again("own-2"))
        theirs = min(theirs, again("finished-2", finished=True))
    if seconds > 1.5 * theirs:
        what = f"a step takes {seconds:.3f} s of processor time, "
        raise Wrong(f"{what}one of the finished program {theirs:.3f} s", HINTS["slow"])
    right("throughput is that of the finished program")
    lost = kill_and_resume(bench, undisturbed, random.Random(), run)
    right(f"a rank was killed; ≈{lost} steps were computed again, and no loss differs in a bit")


STEP = re.compile(r"^step +(\d+)/", re.M)


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kill_and_resume(
    bench: Bench, undisturbed: list[list[float]], chance: random.Random, run: dict = RUN
) -> int:
    """Kill a rank of a real torchrun at a random moment; return how many steps were lost.

    They are lost that were complete and had to be computed again. The moment lies behind the
    first checkpoint, so that a life which does not look for one has lost too many.
    """
    world, (low, high) = world_of(run), (run["every"] + 1, run["steps"] - 2)
    victim, at, pause = chance.randrange(world), chance.randint(low, high), chance.random() / 10
    folder, said, killed = bench.folder / "killed", bench.folder / "said.txt", []
    for name, text in (("torchrun.py", TORCHRUN), ("drive.py", DRIVE)):
        (bench.folder / name).write_text(text)
    for path in (said, *bench.folder.glob("life-*.json")):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)

    def watch(_: dict[int, int]) -> None:
        steps = STEP.findall(text_of(said)) if not killed else []
        if steps and int(steps[-1]) >= at:
            time.sleep(pause)  # into a step, an update or a save
            with contextlib.suppress(OSError):
                os.kill(int(text_of(bench.folder / f"rank-{victim}")), signal.SIGKILL)
                killed.append(victim)

    start = "fork" if LINUX else "spawn"
    torchrun = ("torchrun.py", f"--nproc-per-node={world}", "--max-restarts=3", "--run-path",
                f"--start-method={start}", bench.folder / "drive.py")  # fmt: skip
    config = json.dumps(FLAT | run | {"folder": "killed"})
    end = bench.run("python", *torchrun, bench.path, config, limit=120, watch=watch,
                    OMP_NUM_THREADS="1")  # fmt: skip
    lives, told = sorted(bench.folder.glob("life-*.json")), text_of(said)
    if not killed and not end.status:
        if not STEP.search(told):
            raise Wrong("the run ended, and had told of no step", HINTS["untold"])
        return kill_and_resume(bench, undisturbed, chance, run)  # it was over before
    if end.status or not lives:
        what = f"rank {victim} was killed, and torchrun ended with status {end.status}"
        raise Wrong(what, HINTS["not_recovered"])
    history = json.loads(text_of(lives[-1]))
    first = history[0][0] if history else run["steps"] + 1
    before = told.rpartition("life ")[0]  # what all lives but the last said
    reached = max(map(int, STEP.findall(before)), default=0)
    lost = reached + 1 - first
    if lost > run["every"]:
        what = f"the run had come to step {reached}, and went on with step {first:.0f}"
        raise Wrong(what, HINTS["lost_steps"])
    if history != undisturbed[len(undisturbed) - len(history) :]:
        raise Wrong(f"from step {first:.0f} the losses differ", HINTS["after_kill"])
    return int(max(0, lost))


LAYOUT = (
    (r"must match the size|shape|size mismatch|Expected input batch|expand", "tp_layouts"),
)
STEPS = [
    Step(
        1, "rows for every replica", "the replicas' rows are those of one process, batch after "
        "batch", probe_rows, judge_rows, uses=("Stream",), worlds=(1,), joins=False,
    ),
    Step(
        2, "the mesh", "three dimensions, tp between neighbours", probe_mesh, judge_mesh,
        uses=("make_mesh",), worlds=(4, 8),
    ),
    Step(
        3, "cut over tp", "logits and all gradients are those of the whole model, and every "
        "matrix is cut", probe_cut, judge_cut, uses=("cut",), worlds=(2, 4),
        crashes=tuple((pattern, HINTS[hint]) for pattern, hint in LAYOUT),
    ),
    Step(
        4, "shard over dp", "parameters are cut over dp, products are in bf16, sums in fp32",
        probe_shard, judge_shard, uses=("shard",), worlds=(4,), symmetric=False,
        order_hint=HINTS["whole_mesh"],
    ),
    Step(
        5, "accumulate and clip", "gradients of all rows, and one norm over the mesh",
        probe_step, judge_step, uses=("accumulate", "clip"), worlds=(2, 4),
    ),
    Step(
        6, "a pipeline", "1F1B has the losses and gradients of one process, with p - i "
        "micro-batches live", probe_pipeline, judge_pipeline,
        uses=("layers_of_stage", "make_schedule"), worlds=(2, 4), symmetric=False,
        crashes=(
            (r"^$|stage_index|out of range|Stage index|is out of", HINTS["pp_stage"]),
            (r"micro-?batch|chunk", HINTS["pp_scale"]),
            (r"shape|group|rank|None|mismatch", HINTS["pp_group"]),
        ),
    ),
    Trial(
        7, "a budget of memory", "what a rank needed is within the budget, and state is exact",
        probe_budget, judge_budget, uses=("budget",), worlds=(1, 4), symmetric=False,
    ),
    Trial(
        8, "checkpoints that a killed rank cannot spoil", "the newest `keep` are kept",
        probe_save, judge_save, uses=("save", "complete"), worlds=(1, 2), symmetric=False,
    ),
    Trial(
        9, "resume on any mesh", "parameters, moments and the place in the data are restored",
        probe_load, judge_load, uses=("load",), worlds=(2, 4), symmetric=False,
    ),
    Trial(
        10, "the whole run, and a killed rank", "the run survives a rank",
        probe_run, judge_run, uses=("train", "join"), worlds=(4, 8), symmetric=False,
        needs=(1, 2, 3, 4, 5, 6, 8, 9),
    ),
]  # fmt: skip
