"""The steps of lab 05: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. What only describes (a configuration, a
formula) is compared with the finished lab's, and a wrong value with those that the common
mistakes give. What runs is run with a real engine behind a spy that takes notes.
"""

import copy
import functools
import importlib.util
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from graders.runner import Group, Lesson, Step, Wrong

os.environ["DS_ACCELERATOR"] = "cpu"
logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
try:
    # with what the first engine would import: here once, and not in every process
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer
    import deepspeed.runtime.zero.stage3  # noqa: F401
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.fx.experimental.symbolic_shapes
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
except ImportError:
    sys.exit("lab 05 needs DeepSpeed: pip install deepspeed")

HINTS = {
    "config_kind": "Return a dict, and let the block zero_optimization be a dict in it.",
    "not_divisible": "Such a batch cannot be cut equally: raise ValueError before you "
    "round. Mind the batch that is smaller than one micro-batch on each rank.",
    "batch_global": "train_batch_size is the batch of all ranks together, for one "
    "optimizer step: the argument as it is.",
    "micro_batch": "train_micro_batch_size_per_gpu is what one rank takes in one forward: "
    "the argument as it is.",
    "ranks_forgotten": "All ranks work on the batch at once. What is left to accumulate is "
    "batch / (micro-batch × ranks).",
    "whole_numbers": "The number of accumulated micro-batches is an int: divide by // or "
    "divmod.",
    "zero_block": "stage belongs in the dict zero_optimization. At the top DeepSpeed "
    "ignores it, and trains in stage 0.",
    "unknown_key": "DeepSpeed does not know this key at the top level, and ignores it "
    "without a word: look for the spelling, or for the block it belongs in.",
    "unknown_zero_key": "zero_optimization has no such key: look for the spelling, or for "
    "a key that belongs at the top.",
    "clip_missing": "gradient_clipping stands at the top of the configuration, and is CLIP "
    "here.",
    "bucket": "Bucket sizes count elements, not bytes and not layers. One layer has WIDTH "
    "* WIDTH; both buckets need it, or the default of 500 or 50 million holds.",
    "persistence": "Without stage3_param_persistence_threshold: 0 every tensor of fewer "
    "than 100,000 elements stays whole, and that is every layer of this model.",
    "engine_first": "initialize returns engine, optimizer, data loader and scheduler: "
    "return the first.",
    "optimizer_missing": "The engine must get the optimizer: build_optimizer(model), and "
    "optimizer= in initialize. Without it there is nothing to step.",
    "bypassed": "Call the engine, engine(x), and not the module in it: the engine's "
    "forward does what the stage needs.",
    "rows_same": "All ranks work on the same rows. Each takes its own part of the batch.",
    "rows_lost": "Some rows of the batch are in no forward of any rank, or in several.",
    "micro_size": "The engine counts on micro-batches of the size that is configured: "
    "engine.train_micro_batch_size_per_gpu().",
    "plain_backward": "engine.backward(loss), not loss.backward(): stage 0 refuses the "
    "latter, and fp16 would miss its loss scale.",
    "divided": "engine.backward divides by the number of accumulated micro-batches itself. "
    "Divided twice the gradient is too small, which AdamW hides and clipping does not.",
    "step_each": "engine.step() belongs after every backward: it counts micro-batches, and "
    "acts at the boundary only. Called once per batch it takes that many batches to a step.",
    "own_work": "Leave clipping, the optimizer and zeroing to engine.step(). What you zero "
    "between micro-batches is lost.",
    "loss_local": "This is the mean of this rank's rows. all_reduce it and divide by the "
    "ranks.",
    "loss_sum": "This is a sum. Divide by the micro-batches and by the ranks: all "
    "micro-batches have one size, so the mean of their means is the mean.",
    "loss_last": "This is the loss of the last micro-batch only: add all of them up.",
    "kinds": 'Return a dict with exactly the keys "parameters", "gradients", "master" and '
    '"moments", each with a number of bytes per parameter.',
    "parameters_stage": "Parameters are sharded in stage 3, and only there.",
    "gradients_stage": "Gradients are sharded from stage 2 on. Stage 1 keeps them whole "
    "until the last micro-batch.",
    "master_forgotten": "DeepSpeed keeps a flat fp32 copy of what a rank updates in stages "
    "1 to 3, in fp32 training too.",
    "master_stage0": "Stage 0 in fp32 has no copy: your optimizer works on your parameters.",
    "optimizer_stage": "Moments and master belong to what the rank updates: from stage 1 "
    "on that is a part of 1/N.",
    "moments_two": "AdamW has two moments for each parameter, in fp32: 8 bytes.",
    "config_changed": "The configuration you were given has changed. Return a new dict "
    "(and a new zero_optimization in it): config | {…} makes one.",
    "config_lost": "The new configuration has lost keys of the old one: config | {…} keeps "
    "them.",
    "bf16_block": '"bf16" is a block of its own at the top: {"enabled": True}.',
    "sum_key": "The precision of the sum is the key grad_accum_dtype in a block data_types "
    "at the top, and only if fp32_sum asks for it.",
    "bf16_two": "In bf16 a parameter takes 2 bytes, and so does a gradient.",
    "bf16_master": "With bf16 there is an fp32 master copy in every stage, 4 bytes: in "
    "stage 0, too, an update would be lost without it.",
    "fp32_states": "Master and moments stay in fp32: 4 and 8 bytes per parameter.",
    "fp32_sum": "With grad_accum_dtype fp32 the sum takes the place of the bf16 gradient: "
    "4 bytes in place of 2.",
    "all_reduce_twice": "An all-reduce is a reduce-scatter and an all-gather: every rank "
    "sends (N-1)/N of the buffer twice.",
    "sent_once": "In this collective each rank sends (N-1)/N of the buffer, and once: only "
    "an all-reduce is two of them.",
    "fraction": "A rank keeps one chunk of N to itself: it sends (N-1)/N of the size.",
    "paper_reduce": "Stages 1 and 2 still all-reduce whole buckets. "
    "use_multi_rank_bucket_allreduce: false makes them reduce each part to its owner.",
    "paper_scatter": "reduce_scatter: false is the opposite: it makes every stage "
    "all-reduce its gradients. Leave it out.",
    "paper_release": "Stage 3 still keeps parameters from forward to backward. Both "
    "stage3_max_reuse_distance and stage3_max_live_parameters must be 0.",
    "offload_block": "offload_optimizer is a dict in zero_optimization. At the top "
    "DeepSpeed ignores it.",
    "offload_what": "It is the optimizer that moves, and to the host: offload_optimizer, "
    '"device": "cpu".',
    "pinned": "Pinned memory is for copies to a GPU: pin_memory is true only if the device "
    "is not a CPU.",
    "force_cpu_adam": "DeepSpeed insists on its own compiled Adam here unless "
    "zero_force_ds_cpu_optimizer, at the top, is false.",
    "units": "Every layer must be a unit: fully_shard each of model.layers. The whole "
    "alone makes one unit, which is gathered at once.",
    "no_root": "Shard the model itself, too, after its layers: the outermost call takes "
    "what is left, and links the units.",
    "fsdp_divided": "FSDP2 averages over ranks, not over micro-batches: divide each loss "
    "by their number.",
    "fsdp_averaged": "The gradient is too small by the number of ranks: FSDP2 has averaged "
    "over them already.",
    "fsdp_clip": "The gradient reaches the optimizer unclipped: nn.utils.clip_grad_norm_ "
    "with CLIP, after the last backward.",
    "fsdp_steps": "One optimizer step for each batch, after all micro-batches.",
    "fsdp_zero": "Gradients are still there after the step, and the next batch adds to them.",
    "save_everybody": "save_checkpoint is for all ranks, each of which writes its part. A "
    "rank that stays away leaves the others waiting in it.",
    "save_step": 'The step is not in the checkpoint: client_state={"step": step}.',
    "resume_step": "Return the step from the client state, the second thing that "
    "load_checkpoint returns.",
    "silent_restart": "From an empty folder load_checkpoint returns None for the path, and "
    "no error. Raise FileNotFoundError, or the job trains on from random weights.",
    "resume_states": "The weights are back, and the moments are not: load the optimizer's "
    "states, too (the default).",
    "whole_weights": "This is not the whole model in fp32. The shards are in the files of "
    "all ranks: get_fp32_state_dict_from_zero_checkpoint(folder) puts them together.",
    "universal_key": 'It is the key load_universal, true, in a block "checkpoint" at the top.',
    "other": "The numbers fit no common mistake. Print the configuration, or one loss on "
    "every rank, and compare with the text of the step.",
}

FIELDS = DeepSpeedZeroConfig.model_fields
ZERO_KEYS = set(FIELDS) | {field.alias for field in FIELDS.values()} - {None}


# --- the finished lab, and what is common to the steps ------------------------------------


@functools.lru_cache
def finished() -> ModuleType:
    """The lab with its solutions."""
    path = Path(__file__).parent.parent / "lab05_deepspeed.py"
    spec = importlib.util.spec_from_file_location("finished_lab05", path)
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


def plain(value: Any) -> Any:
    """A configuration as JSON would have it, or a word for what cannot be."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def near(ours: Any, true: float) -> bool:
    return isinstance(ours, (int, float)) and abs(ours - true) <= 1e-5 * max(abs(true), 1e-6)


def read(config: dict, ranks: int = 2) -> DeepSpeedConfig:
    """What DeepSpeed makes of a configuration on so many ranks."""
    with (
        mock.patch.object(comm, "get_rank", lambda *_: 0),
        mock.patch.object(comm, "get_world_size", lambda *_: ranks),
    ):
        return DeepSpeedConfig(copy.deepcopy(config))


def changed(call: Callable[[dict], Any], stage: int) -> tuple[Any, Any]:
    """Call with a configuration of the lab for two ranks; return the answer and what it did."""
    config = finished().make_config(2, 6, 24, stage)
    before = copy.deepcopy(config)
    answer = plain(call(config))
    if config != before:
        return answer, "changed"
    if not isinstance(answer, dict) or not isinstance(answer.get("zero_optimization"), dict):
        return answer, "lost"
    zero = before.pop("zero_optimization")
    kept = (
        before.items() <= answer.items() and zero.items() <= answer["zero_optimization"].items()
    )
    return answer, "kept" if kept else "lost"


def judge_keys(answer: Any, fate: str, what: str) -> None:
    """Raise `Wrong` for a configuration that lost keys or has keys nobody knows."""
    if fate == "changed":
        raise Wrong(f"{what} has changed its argument", HINTS["config_changed"])
    if not isinstance(answer, dict):
        raise Wrong(f"{what} is {answer}", HINTS["config_kind"])
    if fate == "lost":
        raise Wrong(f"{what} has only the keys {sorted(answer)}", HINTS["config_lost"])


def judge_unknown(answer: dict, what: str) -> None:
    """Raise `Wrong` for keys that DeepSpeed does not know."""
    if unknown := finished().unknown_keys(answer):
        raise Wrong(f"{what} has {unknown[0]!r} at the top", HINTS["unknown_key"])
    if unknown := sorted(set(answer["zero_optimization"]) - ZERO_KEYS):
        raise Wrong(
            f"{what} has {unknown[0]!r} in zero_optimization", HINTS["unknown_zero_key"]
        )


# --- step 1 -------------------------------------------------------------------------------

CASES = ((4, 2, 24, 0), (3, 4, 24, 1), (2, 3, 24, 2), (2, 12, 24, 3), (8, 1, 64, 3))
UNCUT = ((2, 5, 24, 0), (4, 12, 24, 1))  # (ranks, micro, batch, stage)


def probe_config(lesson: Lesson) -> None:
    module, _ = keep_only(lesson, "make_config")
    lesson.fact("configs", [plain(module.make_config(*case)) for case in CASES])
    for case in UNCUT:
        try:
            module.make_config(*case)
        except ValueError:
            continue
        lesson.fact("uncut", list(case))


def judge_config(group: Group, right: Callable[[str], None]) -> None:
    size = finished().WIDTH ** 2
    for (ranks, micro, batch, stage), config in zip(
        CASES, group.facts("configs")[0], strict=True
    ):
        what = f"for {ranks} ranks, micro-batch {micro}, batch {batch}, stage {stage}, "
        if not isinstance(config, dict):
            raise Wrong(f"{what}the configuration is {config}", HINTS["config_kind"])
        zero = config.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise Wrong(f"{what}zero_optimization is {zero!r}", HINTS["config_kind"])
        found = config.get("train_batch_size")
        if found != batch:
            raise Wrong(f"{what}train_batch_size is {found}", HINTS["batch_global"])
        found = config.get("train_micro_batch_size_per_gpu")
        if found != micro:
            what = f"{what}train_micro_batch_size_per_gpu is {found}"
            raise Wrong(what, HINTS["micro_batch"])
        found, true = config.get("gradient_accumulation_steps"), batch // (micro * ranks)
        if found == true and not isinstance(found, int):
            raise Wrong(f"{what}it accumulates {found!r}", HINTS["whole_numbers"])
        if found != true:
            raise Wrong(
                f"{what}gradient_accumulation_steps is {found}", HINTS["ranks_forgotten"]
            )
        if "stage" in config or "stage" not in zero:
            raise Wrong(f"{what}zero_optimization has no stage", HINTS["zero_block"])
        judge_unknown(config, f"{what}the configuration")
        if config.get("gradient_clipping") != finished().CLIP:
            found = config.get("gradient_clipping")
            raise Wrong(f"{what}gradient_clipping is {found}", HINTS["clip_missing"])
        for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
            if zero.get(key) != size:
                raise Wrong(f"{what}{key} is {zero.get(key)}, not {size}", HINTS["bucket"])
        if zero.get("stage3_param_persistence_threshold") != 0:
            raise Wrong(f"{what}small tensors stay whole", HINTS["persistence"])
        if zero["stage"] != stage:
            raise Wrong(f"{what}the stage is {zero['stage']}", HINTS["other"])
        read(config, ranks)
    right("five configurations are right, and DeepSpeed reads them")
    if (uncut := group.facts("uncut")[0]) is not None:
        ranks, micro, batch, _ = uncut
        what = f"{batch} rows for {ranks} ranks of {micro} rows each, and no ValueError"
        raise Wrong(what, HINTS["not_divisible"])


# --- step 2 -------------------------------------------------------------------------------


class Spy:
    """A real engine that takes notes of what is asked of it."""

    def __init__(self, engine: Any, batch: torch.Tensor, loss: Callable):
        self.__dict__.update(_engine=engine, _batch=batch, _loss=loss, _inside=False)
        self.__dict__.update(events=[], rows=[], ratios=[], last=None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        same = (x[:, None] == self._batch[None]).all(-1)
        self.rows.append([row.nonzero()[0].item() if row.any() else -1 for row in same])
        self.events.append("forward")
        output = self._engine(x)
        self.__dict__["last"] = self._loss(output, x).item()
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.events.append("backward")
        self.ratios.append(loss.item() / self.last if self.last else None)
        self.__dict__["_inside"] = True
        try:
            return self._engine.backward(loss, *args, **kwargs)
        finally:
            self.__dict__["_inside"] = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("step")
        return self._engine.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "zero_grad", "clip_fp32_gradients", "allreduce_gradients"):
            self.events.append(name)
        return getattr(self._engine, name)


def probe_loop(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "make_engine", "train_step")
    config = lab.make_config(lesson.world, 24 // (4 * lesson.world), 24, 0)
    made = module.make_engine(config, "cpu")
    lesson.fact("made", type(made).__name__)
    lesson.fact("optimizer", type(getattr(made, "optimizer", None)).__name__)
    if isinstance(made, (tuple, list)) or getattr(made, "optimizer", None) is None:
        return
    rows = lab.make_batches()[0]
    spy = Spy(lab.make_engine(config, "cpu"), rows, lab.mean_loss)
    real = torch.Tensor.backward

    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not spy._inside:
            spy.events.append("plain")
            lesson.fact("events", spy.events)
        real(tensor, *args, **kwargs)

    with torch.no_grad():
        model = lab.build_model()
        true = lab.mean_loss(model(rows), rows).item()
    with mock.patch.object(torch.Tensor, "backward", backward):
        returned = module.train_step(spy, rows)
    lesson.fact("events", spy.events)
    lesson.fact("rows", spy.rows)
    lesson.fact("ratios", spy.ratios)
    with torch.no_grad():
        each = [lab.mean_loss(model(rows[r]), rows[r]).item() for r in spy.rows if -1 not in r]
    lesson.fact("losses", each)
    lesson.fact("true", true)
    try:
        lesson.fact("returned", float(returned))
    except (TypeError, ValueError):
        lesson.fact("returned", f"a {type(returned).__name__}")


def judge_returned(group: Group, rank: int, ours: Any, true: float, each: list) -> None:
    """Raise `Wrong` unless `ours` is the mean loss of the whole batch."""
    if near(ours, true):
        return
    n, mine = group.world, each[rank]
    m = len(mine)
    totals = [sum(losses) for losses in each]
    guesses = {
        "loss_local": [totals[rank] / m],
        "loss_sum": [sum(totals), sum(totals) / m, sum(totals) / n, totals[rank]],
        "loss_last": [mine[-1], sum(losses[-1] for losses in each) / n, mine[-1] / m],
    }
    name = next((k for k, values in guesses.items() for v in values if near(ours, v)), "other")
    raise Wrong(f"rank {rank} returns {ours}, the mean loss is {true:.4f}", HINTS[name])


def stuck_in_loop(group: Group) -> None:
    for events in group.facts("events"):
        if events and "plain" in events:
            raise Wrong("loss.backward() was called", HINTS["plain_backward"])


def judge_loop(group: Group, right: Callable[[str], None]) -> None:
    made, optimizer = group.facts("made")[0], group.facts("optimizer")[0]
    if made in ("tuple", "list"):
        raise Wrong(f"make_engine returns a {made}", HINTS["engine_first"])
    if optimizer == "NoneType":
        raise Wrong("the engine has no optimizer", HINTS["optimizer_missing"])
    right("the engine is there, with its optimizer")
    rows, m = group.facts("rows"), 4
    size = 24 // (m * group.world)
    everything = [[row for part in parts for row in part] for parts in rows]
    if not any(everything):
        raise Wrong("the engine was never called", HINTS["bypassed"])
    if group.world > 1 and all(part == everything[0] for part in everything):
        raise Wrong(f"all ranks work on rows {everything[0]}", HINTS["rows_same"])
    if sorted(row for part in everything for row in part) != list(range(24)):
        raise Wrong(f"the ranks work on rows {everything}", HINTS["rows_lost"])
    sizes = {len(part) for parts in rows for part in parts}
    if sizes != {size}:
        found = ", ".join(map(str, sorted(sizes)))
        what = f"micro-batches have {found} rows, configured are {size}"
        raise Wrong(what, HINTS["micro_size"])
    right("every row is in one micro-batch of one rank")
    for rank, events in enumerate(group.facts("events")):
        own = [event for event in events if event not in ("forward", "backward", "step")]
        if own and own[0] == "plain":
            raise Wrong(f"rank {rank} called loss.backward()", HINTS["plain_backward"])
        if own:
            raise Wrong(f"rank {rank} used engine.{own[0]}", HINTS["own_work"])
        ratios = group.facts("ratios")[rank]
        if not all(near(ratio, 1.0) for ratio in ratios):
            what = f"engine.backward got {ratios[0]:.3g} times the loss"
            raise Wrong(what, HINTS["divided" if ratios[0] < 1 else "other"])
        if events != ["forward", "backward", "step"] * m:
            what = f"rank {rank} called {events.count('backward')} times backward and"
            what = f"{what} {events.count('step')} times step"
            raise Wrong(what, HINTS["step_each"])
    right("forward, backward and step for every micro-batch")
    each = group.facts("losses")
    for rank, ours in enumerate(group.facts("returned")):
        judge_returned(group, rank, ours, group.facts("true")[0], each)


# --- step 3 -------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "master", "moments")


def probe_bytes(lesson: Lesson) -> None:
    module, _ = keep_only(lesson, "bytes_held")
    found = {f"{s} {n}": plain(module.bytes_held(s, n)) for s in range(4) for n in (4, 8)}
    lesson.fact("held", found)


def judge_parts(found: Any, true: dict[str, float], what: str) -> str:
    """The first kind that is wrong, or ""."""
    if not isinstance(found, dict) or sorted(found) != sorted(KINDS):
        raise Wrong(f"{what} is {found}", HINTS["kinds"])
    return next((kind for kind in KINDS if not near(found[kind], true[kind])), "")


def judge_bytes(group: Group, right: Callable[[str], None]) -> None:
    for case, found in group.facts("held")[0].items():
        stage, n = map(int, case.split())
        true = finished().bytes_held(stage, n)
        what = f"stage {stage} on {n} ranks"
        kind = judge_parts(found, true, what)
        if not kind:
            continue
        ours = found[kind]
        what = f"of {what}, {kind} are {ours} bytes per parameter"
        hint = "other"
        if kind == "parameters" and ours in (4, 4 / n):
            hint = "parameters_stage"
        elif kind == "gradients" and ours in (4, 4 / n):
            hint = "gradients_stage"
        elif kind == "master" and ours == 0:
            hint = "master_forgotten"
        elif kind == "master" and stage == 0:
            hint = "master_stage0"
        elif kind == "moments" and ours in (4, 4 / n):
            hint = "moments_two"
        elif kind in ("master", "moments") and ours in (4, 8, 4 / n, 8 / n):
            hint = "optimizer_stage"
        raise Wrong(what, HINTS[hint])


# --- step 4 -------------------------------------------------------------------------------

SUMS = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))


def probe_bf16(lesson: Lesson) -> None:
    module, _ = keep_only(lesson, "in_bf16", "bytes_held_bf16")
    for fp32_sum in (False, True):
        answer, fate = changed(lambda config, f=fp32_sum: module.in_bf16(config, f), 2)
        lesson.fact(f"config {fp32_sum}", [answer, fate])
    found = {
        f"{s} {int(f)} {n}": plain(module.bytes_held_bf16(s, n, f))
        for s, f in SUMS
        for n in (4, 8)
    }
    lesson.fact("held", found)


def judge_bf16(group: Group, right: Callable[[str], None]) -> None:
    for fp32_sum in (False, True):
        answer, fate = group.facts(f"config {fp32_sum}")[0]
        what = f"in_bf16 with fp32_sum {fp32_sum}"
        judge_keys(answer, fate, what)
        if (
            not isinstance(answer.get("bf16"), dict)
            or answer["bf16"].get("enabled") is not True
        ):
            raise Wrong(f"{what}: bf16 is {answer.get('bf16')!r}", HINTS["bf16_block"])
        types = answer.get("data_types", {})
        kind = types.get("grad_accum_dtype") if isinstance(types, dict) else types
        if fp32_sum != (kind == "fp32") or "grad_accum_dtype" in answer:
            raise Wrong(f"{what}: data_types is {types}", HINTS["sum_key"])
        judge_unknown(answer, what)
        read(answer)
    right("DeepSpeed reads the configuration as bf16, and sums as asked for")
    for case, found in group.facts("held")[0].items():
        stage, fp32_sum, n = map(int, case.split())
        true = finished().bytes_held_bf16(stage, n, bool(fp32_sum))
        what = f"stage {stage} on {n} ranks" + ", fp32 sums" * fp32_sum
        kind = judge_parts(found, true, what)
        if not kind:
            continue
        ours = found[kind]
        what = f"of {what}, {kind} are {ours} bytes per parameter"
        hint = "other"
        if kind == "parameters":
            hint = "bf16_two" if ours in (4, 4 / n) else "parameters_stage"
        elif kind == "gradients" and fp32_sum:
            hint = "fp32_sum"
        elif kind == "gradients":
            hint = "bf16_two" if ours in (4, 4 / n) else "gradients_stage"
        elif kind == "master" and ours == 0:
            hint = "bf16_master"
        elif ours in (2, 2 / n, 4, 4 / n) and not near(ours * n, true[kind]):
            hint = "fp32_states" if ours < true[kind] else "optimizer_stage"
        else:
            hint = "optimizer_stage"
        raise Wrong(what, HINTS[hint])


# --- step 5 -------------------------------------------------------------------------------


def probe_traffic(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "bytes_sent", "as_in_the_paper")
    kinds = ("all-gather", "reduce-scatter", "reduce", "all-reduce")
    found = {f"{k} {n}": plain(module.bytes_sent(k, 960, n)) for k in kinds for n in (4, 8)}
    lesson.fact("sent", found)
    answers = [changed(module.as_in_the_paper, stage) for stage in range(4)]
    lesson.fact("configs", answers)
    good = all(fate == "kept" for _, fate in answers)
    if good and not any(set(answer["zero_optimization"]) - ZERO_KEYS for answer, _ in answers):
        for stage in (2, 3):
            traffic = lab.traffic_of(answers[stage][0], torch.device("cpu"))
            lesson.fact(f"units {stage}", traffic.in_units())


def judge_traffic(group: Group, right: Callable[[str], None]) -> None:
    for case, ours in group.facts("sent")[0].items():
        kind, n = case.split()[0], int(case.split()[1])
        true = finished().bytes_sent(kind, 960, n)
        if near(ours, true):
            continue
        what = f"in an {kind}" if kind.startswith("all") else f"in a {kind}"
        what = f"{what} of 960 bytes among {n} ranks each sends {true:.0f} bytes, not {ours}"
        once = (n - 1) / n * 960
        hint = "fraction"
        if kind == "all-reduce" and near(ours, once):
            hint = "all_reduce_twice"
        elif kind != "all-reduce" and near(ours, 2 * once):
            hint = "sent_once"
        raise Wrong(what, HINTS[hint])
    right("the bytes of every collective")
    for stage, (answer, fate) in enumerate(group.facts("configs")[0]):
        what = f"the configuration of stage {stage}"
        judge_keys(answer, fate, what)
        judge_unknown(answer, what)
        if answer["zero_optimization"].get("reduce_scatter") is False:
            raise Wrong(f"{what} has reduce_scatter: false", HINTS["paper_scatter"])
    n, m = group.world, 2
    for stage, formula, hint in ((2, m + 1, "paper_reduce"), (3, 3 * m, "paper_release")):
        units = group.facts(f"units {stage}")[0]
        if not near(units, formula):
            what = f"stage {stage} sends {units:.2f} × (N-1)/N × 4Ψ in a step, not {formula}"
            raise Wrong(f"{what} (N = {n}, 2 micro-batches)", HINTS[hint])


# --- step 6 -------------------------------------------------------------------------------


def probe_offload(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "offloaded")
    cpu = torch.device("cpu")
    answers = [changed(lambda config: module.offloaded(config, cpu), s) for s in (1, 2, 3)]
    lesson.fact("configs", answers)
    gpu, _ = changed(lambda config: module.offloaded(config, torch.device("cuda", 0)), 2)
    lesson.fact("gpu", gpu)
    if offload_fault(answers) is None:
        for stage in (2, 3):
            engine = lab.make_engine(answers[stage - 1][0], cpu)
            lesson.fact(f"uses {stage}", bool(engine.zero_use_cpu_optimizer()))
            losses = [lab.train_step(engine, rows) for rows in lab.make_batches()[:2]]
            lesson.fact(f"losses {stage}", losses)


def offload_fault(answers: list) -> tuple[str, str] | None:
    """What is wrong with the configurations, and the hint, or None."""
    for answer, fate in answers:
        what = "the configuration"
        try:
            judge_keys(answer, fate, what)
        except Wrong as wrong:
            name = next(key for key, text in HINTS.items() if text == wrong.hint)
            return wrong.what, name
        zero = answer["zero_optimization"]
        if "offload_optimizer" in answer:
            return f"{what} has offload_optimizer at the top", "offload_block"
        block = zero.get("offload_optimizer")
        device = block.get("device") if isinstance(block, dict) else block
        if device != "cpu":
            return f"in zero_optimization, offload_optimizer is {block}", "offload_what"
        if "zero_force_ds_cpu_optimizer" in zero:
            what = "zero_optimization has 'zero_force_ds_cpu_optimizer'"
            return what, "force_cpu_adam"
        if answer.get("zero_force_ds_cpu_optimizer") is not False:
            return "DeepSpeed refuses torch's AdamW for offload", "force_cpu_adam"
        if block.get("pin_memory"):
            return "on a CPU, pin_memory is true", "pinned"
    return None


def judge_offload(group: Group, right: Callable[[str], None]) -> None:
    answers = group.facts("configs")[0]
    if fault := offload_fault(answers):
        raise Wrong(fault[0], HINTS[fault[1]])
    for answer, _ in answers:
        judge_unknown(answer, "the configuration")
    gpu = group.facts("gpu")[0]["zero_optimization"]["offload_optimizer"]
    if gpu.get("pin_memory") is not True:
        raise Wrong(f"for a GPU, offload_optimizer is {gpu}", HINTS["pinned"])
    for stage in (2, 3):
        if not group.facts(f"uses {stage}")[0]:
            raise Wrong(f"stage {stage} does not offload", HINTS["offload_what"])
        losses, true = group.facts(f"losses {stage}")[0], finished().train_alone()[:2]
        if not all(map(near, losses, true)):
            raise Wrong(f"the losses of stage {stage} are {losses}, not {true}", HINTS["other"])


# --- step 7 -------------------------------------------------------------------------------


class Recorder:
    """An optimizer that keeps the gradients it is asked to step with, and changes nothing."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.gradients, self.zeroed = model, [], 0
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.0}]

    def step(self, *_: Any) -> None:
        whole = [
            torch.zeros(()) if p.grad is None else p.grad.full_tensor().flatten()
            for p in self.model.parameters()
        ]
        self.gradients.append(torch.cat([part.reshape(-1) for part in whole]))

    def zero_grad(self, *_: Any, **__: Any) -> None:
        self.zeroed += 1
        for parameter in self.model.parameters():
            parameter.grad = None


def probe_fsdp(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "shard", "fsdp_step")
    returned = module.shard(lab.build_model())
    kind = torch.distributed.fsdp.FSDPModule
    if not isinstance(returned, torch.nn.Module):
        lesson.fact("units", None)
        return
    units = [name for name, part in returned.named_modules() if isinstance(part, kind)]
    lesson.fact("units", units)

    n, m = lesson.world, 4
    micro = 24 // (m * n)
    for scale in (1.0, 0.25):  # the norm is over the limit, or below it
        rows = lab.make_batches()[0] * scale
        alone = lab.build_model()
        loss = lab.mean_loss(alone(rows), rows)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
        whole = torch.cat([p.grad.flatten() for p in alone.parameters()])
        clip = min(1.0, lab.CLIP / (norm.item() + 1e-6))
        factors = {"right": clip, "unclipped": 1.0, "undivided": m, "averaged": 1 / n}
        factors["undivided, clipped"] = min(m, lab.CLIP / norm.item())

        model = lab.shard(lab.build_model())
        recorder = Recorder(model)
        ours = module.fsdp_step(model, recorder, rows, micro)
        lesson.fact(f"steps {scale}", len(recorder.gradients))
        found = "other"
        if len(recorder.gradients) == 1:
            gradient = recorder.gradients[0]
            for name, factor in factors.items():
                if gradient.shape == whole.shape and torch.allclose(
                    gradient, factor * whole, rtol=1e-3, atol=1e-6
                ):
                    found = name
                    break
        lesson.fact(f"gradient {scale}", found)
        left = any(p.grad is not None and p.grad.any() for p in model.parameters())
        lesson.fact("left", bool(left))
        with torch.no_grad():
            parts = rows.chunk(n)[lesson.rank].split(micro)
            each = [lab.mean_loss(alone(x), x).item() for x in parts]
        lesson.fact("losses", each)
        lesson.fact("true", loss.item())
        try:
            lesson.fact("returned", float(ours))
        except (TypeError, ValueError):
            lesson.fact("returned", f"a {type(ours).__name__}")


def judge_fsdp(group: Group, right: Callable[[str], None]) -> None:
    units = group.facts("units")[0]
    layers = {f"layers.{number}" for number in range(finished().LAYERS)}
    if units is None:
        raise Wrong("shard does not return the model", HINTS["other"])
    if not layers <= set(units):
        raise Wrong(f"{len(units)} modules are units, {units[:3]}", HINTS["units"])
    if "" not in units:
        raise Wrong("the layers are units, and the model is not", HINTS["no_root"])
    right("every layer is a unit, and so is the whole")
    for scale in (0.25, 1.0):
        steps = group.facts(f"steps {scale}")[0]
        if steps != 1:
            raise Wrong(f"{steps} optimizer steps for one batch", HINTS["fsdp_steps"])
        found = group.facts(f"gradient {scale}")[0]
        if found == "right":
            continue
        what = f"the optimizer's gradient is not that of the whole batch ({found})"
        names = {"averaged": "fsdp_averaged", "unclipped": "fsdp_clip"}
        hint = "fsdp_divided" if found.startswith("undivided") else names.get(found, "other")
        raise Wrong(what, HINTS[hint])
    right("the optimizer gets the clipped gradient of the whole batch, once")
    if any(group.facts("left")):
        raise Wrong("gradients are left after the step", HINTS["fsdp_zero"])
    each = group.facts("losses")
    for rank, ours in enumerate(group.facts("returned")):
        judge_returned(group, rank, ours, group.facts("true")[0], each)


# --- step 8 -------------------------------------------------------------------------------


def probe_checkpoint(lesson: Lesson) -> None:
    module, lab = keep_only(lesson, "save", "resume", "whole_weights", "universal")
    config = lab.make_config(lesson.world, 24 // (2 * lesson.world), 24, 2)
    rows = lab.make_batches()[0]
    engine = lab.make_engine(config)
    lab.train_step(engine, rows)

    # save: first with an engine that only takes notes
    notes: dict[str, Any] = {}

    def note(save_dir=None, tag=None, client_state=None, **_: Any) -> bool:
        notes.update(folder=str(save_dir), state=plain(client_state))
        return True

    with mock.patch.object(engine, "save_checkpoint", note):
        module.save(engine, "mine", 7)
    lesson.fact("saved", notes)
    lab.save(engine, "reference", 7)
    dist.barrier()

    answer, fate = changed(module.universal, 1)
    lesson.fact("universal", [answer, fate])

    fresh = lab.make_engine(config)
    lesson.fact("step", plain(module.resume(fresh, "reference")))
    pairs = zip(engine.module.parameters(), fresh.module.parameters(), strict=True)
    lesson.fact("weights", all(torch.equal(a, b) for a, b in pairs))
    lesson.fact("moments", moment(fresh) == moment(engine))
    try:
        module.resume(lab.make_engine(config), "nothing")
        lesson.fact("nothing", "no error")
    except FileNotFoundError:
        lesson.fact("nothing", "FileNotFoundError")
    except (TypeError, KeyError, AssertionError, ValueError, AttributeError) as error:
        lesson.fact("nothing", type(error).__name__)

    # the whole weights, of stage 3 in bf16: the master copies alone have all the bits
    config = lab.in_bf16(
        config | {"zero_optimization": {**config["zero_optimization"], "stage": 3}}
    )
    engine = lab.make_engine(config)
    lab.train_step(engine, rows)
    lab.save(engine, "whole", 1)
    dist.barrier()
    true = lab.whole_weights("whole")
    found = module.whole_weights("whole")
    verdict = f"a {type(found).__name__}"
    if isinstance(found, dict):
        verdict = f"{len(found)} tensors"
        if set(found) == set(true):
            same = [torch.equal(found[name].float(), true[name]) for name in true]
            sizes = sum(found[name].numel() for name in true)
            verdict = "right" if all(same) else f"other numbers, {sizes} of them"
    lesson.fact("whole", verdict)


def moment(engine: Any) -> float:
    """The sum over this rank's first moments; 0.0 if there are none."""
    states = engine.optimizer.optimizer.state.values()
    return float(sum(state["exp_avg"].double().abs().sum() for state in states if state))


def judge_checkpoint(group: Group, right: Callable[[str], None]) -> None:
    for rank, notes in enumerate(group.facts("saved")):
        if not notes:
            raise Wrong(f"rank {rank} does not call save_checkpoint", HINTS["save_everybody"])
        if notes["folder"] != "mine":
            raise Wrong(f"rank {rank} saves to {notes['folder']}", HINTS["other"])
        if not isinstance(notes["state"], dict) or notes["state"].get("step") != 7:
            what = f"the client state of rank {rank} is {notes['state']}"
            raise Wrong(what, HINTS["save_step"])
    right("all ranks save, with the step")
    answer, fate = group.facts("universal")[0]
    what = "the universal configuration"
    judge_keys(answer, fate, what)
    block = answer.get("checkpoint")
    if not isinstance(block, dict) or block.get("load_universal") is not True:
        raise Wrong(f"{what} has {block} for checkpoint", HINTS["universal_key"])
    for rank, step in enumerate(group.facts("step")):
        if not group.facts("weights")[rank]:
            raise Wrong(f"rank {rank} has not the weights that were saved", HINTS["other"])
        if not group.facts("moments")[rank]:
            raise Wrong(f"rank {rank} has not the moments of before", HINTS["resume_states"])
        if step != 7:
            raise Wrong(f"resume returns {step}, saved was step 7", HINTS["resume_step"])
        nothing = group.facts("nothing")[rank]
        if nothing != "FileNotFoundError":
            what = f"resume from a folder without a checkpoint: {nothing}"
            raise Wrong(what, HINTS["silent_restart"])
    right("training resumes with weights, moments and step")
    for rank, found in enumerate(group.facts("whole")):
        if found != "right":
            raise Wrong(f"rank {rank} gets {found}", HINTS["whole_weights"])


STEPS = [
    Step(
        1,
        "a configuration, and who checks it",
        "batches are cut to the row, keys are where DeepSpeed looks for them",
        probe_config,
        judge_config,
        uses=("make_config",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        2,
        "the loop belongs to the engine",
        "every row once, backward and step for every micro-batch, the loss of the whole batch",
        probe_loop,
        judge_loop,
        uses=("make_engine", "train_step"),
        worlds=(2, 3),
        symmetric=False,
        stuck=stuck_in_loop,
        crashes=(
            ("Direct calls to tensor.backward", HINTS["plain_backward"]),
            ("requires an optimizer", HINTS["optimizer_missing"]),
        ),
    ),
    Step(
        3,
        "what each rank holds",
        "parameters, gradients, master copy and moments of all stages",
        probe_bytes,
        judge_bytes,
        uses=("bytes_held",),
        worlds=(1,),
        joins=False,
    ),
    Step(
        4,
        "bf16, and the 16 bytes again",
        "DeepSpeed reads bf16, and every kind is counted in its precision",
        probe_bf16,
        judge_bf16,
        uses=("in_bf16", "bytes_held_bf16"),
        worlds=(1,),
        joins=False,
    ),
    Step(
        5,
        "what each rank sends",
        "the bytes of each collective, and the traffic of the paper, counted",
        probe_traffic,
        judge_traffic,
        uses=("bytes_sent", "as_in_the_paper"),
        worlds=(2,),
        symmetric=False,
    ),
    Step(
        6,
        "the optimizer in host memory",
        "DeepSpeed offloads in stages 1 to 3, with the losses of one process",
        probe_offload,
        judge_offload,
        uses=("offloaded",),
        worlds=(2,),
        symmetric=False,
    ),
    Step(
        7,
        "FSDP2 does the same",
        "layers are units, and the step has the gradient and the loss of one process",
        probe_fsdp,
        judge_fsdp,
        uses=("shard", "fsdp_step"),
        worlds=(2, 3),
        symmetric=False,
    ),
    Step(
        8,
        "save, and come back",
        "weights, moments and step come back, on every rank and as a whole",
        probe_checkpoint,
        judge_checkpoint,
        uses=("save", "resume", "whole_weights", "universal"),
        worlds=(2,),
        symmetric=False,
    ),
]
