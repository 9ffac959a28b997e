"""The steps of lab 05: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. What only describes (a configuration, a
formula) is compared with the finished lab's, and a wrong value with those that the common
mistakes give. What runs is run with a real engine behind a spy that takes notes.
"""

import contextlib
import copy
import itertools
import logging
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from graders.tools import Lab, Wrong, ask, named, near, same

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
    "latter, and so does fp16 with ZeRO, where the loss must be scaled first.",
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

LAB = Lab(HINTS)
CPU = torch.device("cpu")
FIELDS = DeepSpeedZeroConfig.model_fields
ZERO_KEYS = set(FIELDS) | {field.alias for field in FIELDS.values()} - {None}


# --- what is common to the steps ----------------------------------------------------------


def read(config: dict, ranks: int = 2) -> DeepSpeedConfig:
    """What DeepSpeed makes of a configuration on so many ranks."""
    with (
        mock.patch.object(comm, "get_rank", lambda *_: 0),
        mock.patch.object(comm, "get_world_size", lambda *_: ranks),
    ):
        return DeepSpeedConfig(copy.deepcopy(config))


def answer_to(call: Callable[[dict], Any], stage: int, what: str) -> dict:
    """What is made of the lab's configuration for two ranks; `Wrong` if keys are lost."""
    config = LAB.finished.make_config(2, 6, 24, stage)
    before = copy.deepcopy(config)
    answer = call(config)
    ask(config == before, f"{what} has changed its argument", "config_changed")
    ask(isinstance(answer, dict), f"{what} is {answer}", "config_kind")
    inner, zero = before.pop("zero_optimization"), answer.get("zero_optimization")
    kept = before.items() <= answer.items()
    kept = kept and isinstance(zero, dict) and inner.items() <= zero.items()
    ask(kept, f"{what} has only the keys {sorted(answer)}", "config_lost")
    return answer


def within(config: Any, *keys: str) -> Any:
    """The value under a key of a key of …; None if there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def ask_known(config: dict, what: str) -> None:
    """Raise `Wrong` for keys that DeepSpeed does not know."""
    if unknown := LAB.finished.unknown_keys(config):
        raise Wrong(f"{what} has {unknown[0]!r} at the top", "unknown_key")
    if unknown := sorted(set(config["zero_optimization"]) - ZERO_KEYS):
        raise Wrong(f"{what} has {unknown[0]!r} in zero_optimization", "unknown_zero_key")


def number(value: Any) -> float | str:
    """A loss as a number, or a word for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def judge_loss(rank: int, found: float | str, parts: list[list[torch.Tensor]]) -> None:
    """Raise `Wrong` unless this rank has returned the mean loss.

    `parts`: the micro-batches of each rank.
    """
    lab, n, m = LAB.finished, len(parts), len(parts[rank])
    model = lab.build_model().requires_grad_(False)
    each = [[lab.mean_loss(model(x), x).item() for x in micros] for micros in parts]
    mine, totals = each[rank], [sum(losses) for losses in each]
    true = sum(totals) / m / n
    known = {
        "loss_local": totals[rank] / m,
        "loss_sum": [sum(totals), sum(totals) / m, sum(totals) / n, totals[rank]],
        "loss_last": [mine[-1], sum(losses[-1] for losses in each) / n, mine[-1] / m],
    }
    what = f"rank {rank} returns {found}, the mean loss is {true:.4f}"
    ask(near(found, true, 1e-5), what, named(found, known, 1e-5))


# --- step 1 -------------------------------------------------------------------------------

CASES = ((4, 2, 24, 0), (3, 4, 24, 1), (2, 3, 24, 2), (2, 12, 24, 3), (8, 1, 64, 3))
BATCH_HINTS = {
    "train_batch_size": "batch_global",
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "ranks_forgotten",
}
UNCUT = ((4, 12, 24, 1), (2, 5, 24, 0))  # (ranks, micro, batch, stage)


@LAB.alone(
    1, "a configuration, and who checks it",
    "batches are cut to the row, keys are where DeepSpeed looks for them", "make_config",
)  # fmt: skip
def configuration(theirs, ours, lesson):
    for ranks, micro, batch, stage in CASES:
        what = f"for {ranks} ranks, micro-batch {micro}, batch {batch}, stage {stage}, "
        config = theirs.make_config(ranks, micro, batch, stage)
        ask(isinstance(config, dict), f"{what}the configuration is {config}", "config_kind")
        zero = config.get("zero_optimization", {})
        ask(isinstance(zero, dict), f"{what}zero_optimization is {zero!r}", "config_kind")
        true = ours.make_config(ranks, micro, batch, stage)
        for key, hint in BATCH_HINTS.items():
            ask(config.get(key) == true[key], f"{what}{key} is {config.get(key)}", hint)
        found = config["gradient_accumulation_steps"]
        ask(isinstance(found, int), f"{what}it accumulates {found!r}", "whole_numbers")
        placed = "stage" in zero and "stage" not in config
        ask(placed, f"{what}zero_optimization has no stage", "zero_block")
        ask_known(config, f"{what}the configuration")
        found, size = config.get("gradient_clipping"), ours.WIDTH**2
        ask(found == ours.CLIP, f"{what}gradient_clipping is {found}", "clip_missing")
        for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
            ask(zero.get(key) == size, f"{what}{key} is {zero.get(key)}, not {size}", "bucket")
        sharded = zero.get("stage3_param_persistence_threshold") == 0
        ask(sharded, f"{what}small tensors stay whole", "persistence")
        ask(zero["stage"] == stage, f"{what}the stage is {zero['stage']}", "other")
        read(config, ranks)
    yield "five configurations are right, and DeepSpeed reads them"
    for ranks, micro, batch, stage in UNCUT:
        with contextlib.suppress(ValueError):
            theirs.make_config(ranks, micro, batch, stage)
            what = f"{batch} rows for {ranks} ranks of {micro} rows each, and no ValueError"
            raise Wrong(what, "not_divisible")


# --- step 2 -------------------------------------------------------------------------------


class Spy:
    """A real engine that takes notes of what is asked of it."""

    def __init__(self, engine: Any, batch: torch.Tensor, loss: Callable):
        self._engine, self._batch, self._loss = engine, batch, loss
        self._inside, self._last = False, math.nan
        self.events, self.rows, self.ratios = [], [], []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        equal = (x[:, None] == self._batch[None]).all(-1)
        self.rows.append([row.nonzero()[0].item() if row.any() else -1 for row in equal])
        self.events.append("forward")
        output = self._engine(x)
        self._last = self._loss(output, x).item()
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.events.append("backward")
        self.ratios.append(loss.item() / (self._last or math.nan))
        self._inside = True
        try:
            return self._engine.backward(loss, *args, **kwargs)
        finally:
            self._inside = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.events.append("step")
        return self._engine.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "zero_grad", "clip_fp32_gradients", "allreduce_gradients"):
            self.events.append(name)
        return getattr(self._engine, name)


@LAB.step(
    2, "the loop belongs to the engine",
    "every row once, backward and step for every micro-batch, the loss of the whole batch",
    "make_engine train_step", worlds=(2, 3), symmetric=False,
    crashes={
        "Direct calls to tensor.backward": "plain_backward",
        "requires an optimizer": "optimizer_missing",
    },
)  # fmt: skip
def loop(theirs, ours, lesson):
    config = ours.make_config(lesson.world, 24 // (4 * lesson.world), 24, 0)
    made = theirs.make_engine(config, "cpu")
    what = f"make_engine returns a {type(made).__name__}"
    ask(not isinstance(made, (tuple, list)), what, "engine_first")
    optimizer = getattr(made, "optimizer", None)
    ask(optimizer is not None, "the engine has no optimizer", "optimizer_missing")
    yield "the engine is there, with its optimizer"
    rows = ours.make_batches()[0]
    spy = Spy(ours.make_engine(config, "cpu"), rows, ours.mean_loss)
    real = torch.Tensor.backward

    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not spy._inside:
            spy.events.append("plain")
            lesson.fact("events", spy.events)
        real(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "backward", backward):
        lesson.fact("returned", number(theirs.train_step(spy, rows)))
    for name in ("events", "rows", "ratios"):
        lesson.fact(name, getattr(spy, name))


@loop.stuck
def _(group):
    for events in group.facts("events"):
        ask("plain" not in (events or ()), "loss.backward() was called", "plain_backward")


@loop.judge
def _(group):
    rows, m = group.facts("rows"), 4
    size = 24 // (m * group.world)
    of_ranks = [list(itertools.chain(*parts)) for parts in rows]
    ask(any(of_ranks), "the engine was never called", "bypassed")
    differ = any(part != of_ranks[0] for part in of_ranks)
    ask(differ, f"all ranks work on rows {of_ranks[0]}", "rows_same")
    whole = sorted(itertools.chain(*of_ranks)) == list(range(24))
    ask(whole, f"the ranks work on rows {of_ranks}", "rows_lost")
    sizes = sorted({len(part) for parts in rows for part in parts})
    what = f"micro-batches have {', '.join(map(str, sizes))} rows, configured are {size}"
    ask(sizes == [size], what, "micro_size")
    yield "every row is in one micro-batch of one rank"
    for rank, events in enumerate(group.facts("events")):
        own = [event for event in events if event not in ("forward", "backward", "step")]
        ask(own[:1] != ["plain"], f"rank {rank} called loss.backward()", "plain_backward")
        for name in own:
            raise Wrong(f"rank {rank} used engine.{name}", "own_work")
        for ratio in group.facts("ratios")[rank]:
            what = f"engine.backward got {ratio:.3g} times the loss"
            ask(near(ratio, 1.0, 1e-5), what, "divided" if ratio < 1 else "other")
        counts = [f"{events.count(name)} times {name}" for name in ("backward", "step")]
        what = f"rank {rank} called {' and '.join(counts)}"
        ask(events == ["forward", "backward", "step"] * m, what, "step_each")
    yield "forward, backward and step for every micro-batch"
    batch = LAB.finished.make_batches()[0]
    for rank, found in enumerate(group.facts("returned")):
        judge_loss(rank, found, [[batch[part] for part in parts] for parts in rows])


# --- step 3 -------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "master", "moments")


def wrong_kinds(found: Any, true: dict, case: str) -> Iterator[tuple[str, float, str]]:
    """Each kind that is wrong, its bytes, and the sentence for it."""
    kinds = isinstance(found, dict) and sorted(found) == sorted(KINDS)
    ask(kinds, f"{case} is {found}", "kinds")
    for kind in KINDS:
        if not near(held := found[kind], true[kind], 1e-5):
            yield kind, held, f"of {case}, {kind} are {held} bytes per parameter"


@LAB.alone(
    3, "what each rank holds", "parameters, gradients, master copy and moments of all stages",
    "bytes_held",
)  # fmt: skip
def held_in_fp32(theirs, ours, lesson):
    for stage, n in itertools.product(range(4), (4, 8)):
        found, true = theirs.bytes_held(stage, n), ours.bytes_held(stage, n)
        four, states = [4, 4 / n], [4, 4 / n, 8, 8 / n]
        known = {
            "parameters": {"parameters_stage": four},
            "gradients": {"gradients_stage": four},
            "master": {"master_forgotten": 0, "optimizer_stage": states},
            "moments": {"moments_two": four, "optimizer_stage": states},
        }
        for kind, held, what in wrong_kinds(found, true, f"stage {stage} on {n} ranks"):
            ask(kind != "master" or stage, what, "master_stage0")
            raise Wrong(what, named(held, known[kind]))


# --- step 4 -------------------------------------------------------------------------------

SUMS = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))


@LAB.alone(
    4, "bf16, and the 16 bytes again",
    "DeepSpeed reads bf16, and every kind is counted in its precision",
    "in_bf16 bytes_held_bf16",
)  # fmt: skip
def held_in_bf16(theirs, ours, lesson):
    for fp32_sum in (False, True):
        what = f"in_bf16 with fp32_sum {fp32_sum}"
        answer = answer_to(lambda config, f=fp32_sum: theirs.in_bf16(config, f), 2, what)
        enabled = within(answer, "bf16", "enabled") is True
        ask(enabled, f"{what}: bf16 is {answer.get('bf16')!r}", "bf16_block")
        sums = within(answer, "data_types", "grad_accum_dtype") == "fp32"
        as_asked = fp32_sum == sums and "grad_accum_dtype" not in answer
        ask(as_asked, f"{what}: data_types is {answer.get('data_types', {})}", "sum_key")
        ask_known(answer, what)
        read(answer)
    yield "DeepSpeed reads the configuration as bf16, and sums as asked for"
    for (stage, fp32_sum), n in itertools.product(SUMS, (4, 8)):
        found, true = (lab.bytes_held_bf16(stage, n, fp32_sum) for lab in (theirs, ours))
        case = f"stage {stage} on {n} ranks" + ", fp32 sums" * fp32_sum
        for kind, held, what in wrong_kinds(found, true, case):
            ask(kind != "gradients" or not fp32_sum, what, "fp32_sum")
            if kind in ("parameters", "gradients"):
                raise Wrong(what, "bf16_two" if held in (4, 4 / n) else f"{kind}_stage")
            ask(kind != "master" or held != 0, what, "bf16_master")
            narrow = held in (2, 2 / n, 4, 4 / n) and held < true[kind]
            sharded = near(held * n, true[kind], 1e-5)
            raise Wrong(what, "fp32_states" if narrow and not sharded else "optimizer_stage")


# --- step 5 -------------------------------------------------------------------------------


@LAB.step(
    5, "what each rank sends",
    "the bytes of each collective, and the traffic of the paper, counted",
    "bytes_sent as_in_the_paper", worlds=(2,), symmetric=False,
)  # fmt: skip
def traffic(theirs, ours, lesson):
    kinds = ("all-gather", "reduce-scatter", "reduce", "all-reduce")
    for kind, n in itertools.product(kinds, (4, 8)):
        found, true = theirs.bytes_sent(kind, 960, n), ours.bytes_sent(kind, 960, n)
        known = {"sent_once": 2 * true}
        if kind == "all-reduce":
            known = {"all_reduce_twice": true / 2}
        what = f"in a{'n' * kind.startswith('all')} {kind} of 960 bytes among {n} ranks"
        what = f"{what} each sends {true:.0f} bytes, not {found}"
        ask(near(found, true, 1e-5), what, named(found, known, 1e-5, "fraction"))
    yield "the bytes of every collective"
    answers = []
    for stage in range(4):
        what = f"the configuration of stage {stage}"
        answers.append(answer := answer_to(theirs.as_in_the_paper, stage, what))
        ask_known(answer, what)
        all_reduces = answer["zero_optimization"].get("reduce_scatter") is False
        ask(not all_reduces, f"{what} has reduce_scatter: false", "paper_scatter")
    n, m = lesson.world, 2
    for stage, formula, hint in ((2, m + 1, "paper_reduce"), (3, 3 * m, "paper_release")):
        units = ours.traffic_of(answers[stage], CPU).in_units()
        what = f"stage {stage} sends {units:.2f} × (N-1)/N × 4Ψ in a step, not {formula}"
        ask(near(units, formula, 1e-5), f"{what} (N = {n}, 2 micro-batches)", hint)


# --- step 6 -------------------------------------------------------------------------------


@LAB.step(
    6, "the optimizer in host memory",
    "DeepSpeed offloads in stages 1 to 3, with the losses of one process",
    "offloaded", worlds=(2,), symmetric=False,
)  # fmt: skip
def offload(theirs, ours, lesson):
    what, key, answers = "the configuration", "zero_force_ds_cpu_optimizer", {}
    for stage in (1, 2, 3):
        answer = answer_to(lambda config: theirs.offloaded(config, CPU), stage, what)
        zero, answers[stage] = answer["zero_optimization"], answer
        on_top = "offload_optimizer" in answer
        ask(not on_top, f"{what} has offload_optimizer at the top", "offload_block")
        block = zero.get("offload_optimizer")
        moved = within(block, "device") == "cpu"
        ask(moved, f"in zero_optimization, offload_optimizer is {block}", "offload_what")
        ask(key not in zero, f"zero_optimization has {key!r}", "force_cpu_adam")
        refused = answer.get(key) is not False
        ask(not refused, "DeepSpeed refuses torch's AdamW for offload", "force_cpu_adam")
        ask(not block.get("pin_memory"), "on a CPU, pin_memory is true", "pinned")
        ask_known(answer, what)
    gpu = answer_to(lambda config: theirs.offloaded(config, torch.device("cuda", 0)), 2, what)
    block = within(gpu, "zero_optimization", "offload_optimizer")
    pinned = within(block, "pin_memory") is True
    ask(pinned, f"for a GPU, offload_optimizer is {block}", "pinned")
    true = ours.train_alone()[:2]
    for stage in (2, 3):
        engine = ours.make_engine(answers[stage], CPU)
        ask(engine.zero_use_cpu_optimizer(), f"stage {stage} does not offload", "offload_what")
        losses = [ours.train_step(engine, rows) for rows in ours.make_batches()[:2]]
        what = f"the losses of stage {stage} are {losses}, not {true}"
        ask(same(losses, true, 1e-5), what, "other")


# --- step 7 -------------------------------------------------------------------------------


class Recorder:
    """An optimizer that keeps the gradients it is asked to step with, and changes nothing."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.gradients = model, []
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.0}]

    def step(self, *_: Any) -> None:
        given = [p.grad for p in self.model.parameters()]
        whole = [torch.zeros(1) if g is None else g.full_tensor().flatten() for g in given]
        self.gradients.append(torch.cat(whole))

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


@LAB.step(
    7, "FSDP2 does the same",
    "layers are units, and the step has the gradient and the loss of one process",
    "shard fsdp_step", worlds=(2, 3), symmetric=False,
)  # fmt: skip
def fsdp(theirs, ours, lesson):
    returned = theirs.shard(ours.build_model())
    ask(isinstance(returned, torch.nn.Module), "shard does not return the model", "other")
    kind = torch.distributed.fsdp.FSDPModule
    units = [name for name, part in returned.named_modules() if isinstance(part, kind)]
    layers = {f"layers.{number}" for number in range(ours.LAYERS)}
    ask(layers <= set(units), f"{len(units)} modules are units, {units[:3]}", "units")
    ask("" in units, "the layers are units, and the model is not", "no_root")
    yield "every layer is a unit, and so is the whole"

    n, m = lesson.world, 4
    micro = 24 // (m * n)
    for scale in (0.25, 1.0):  # the norm is below the limit, or over it
        rows, alone = ours.make_batches()[0] * scale, ours.build_model()
        ours.mean_loss(alone(rows), rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
        gradient = torch.cat([p.grad.flatten() for p in alone.parameters()])
        model = ours.shard(ours.build_model())
        recorder = Recorder(model)
        found = theirs.fsdp_step(model, recorder, rows, micro)
        steps = len(recorder.gradients)
        ask(steps == 1, f"{steps} optimizer steps for one batch", "fsdp_steps")
        known = (
            ("right", min(1.0, ours.CLIP / (norm + 1e-6)), ""),
            ("unclipped", 1.0, "fsdp_clip"),
            ("undivided", m, "fsdp_divided"),
            ("averaged", 1 / n, "fsdp_averaged"),
            ("undivided, clipped", min(m, ours.CLIP / norm), "fsdp_divided"),
        )
        given = recorder.gradients[0]
        fits = ((name, hint) for name, f, hint in known if same(given, f * gradient, 1e-3))
        name, hint = next(fits, ("other", "other"))
        what = f"the optimizer's gradient is not that of the whole batch ({name})"
        ask(name == "right", what, hint)
    yield "the optimizer gets the clipped gradient of the whole batch, once"
    left = any(p.grad is not None and p.grad.any() for p in model.parameters())
    ask(not left, "gradients are left after the step", "fsdp_zero")
    judge_loss(lesson.rank, number(found), [part.split(micro) for part in rows.chunk(n)])


# --- step 8 -------------------------------------------------------------------------------


def moment(engine: Any) -> float:
    """The sum over this rank's first moments; 0.0 if there are none."""
    states = engine.optimizer.optimizer.state.values()
    return float(sum(state["exp_avg"].double().abs().sum() for state in states if state))


@LAB.step(
    8, "save, and come back",
    "weights, moments and step come back, on every rank and as a whole",
    "save resume whole_weights universal", worlds=(2,), symmetric=False,
)  # fmt: skip
def checkpoint(theirs, ours, lesson):
    config = ours.make_config(lesson.world, 24 // (2 * lesson.world), 24, 2)
    rows, rank = ours.make_batches()[0], lesson.rank
    engine = ours.make_engine(config)
    ours.train_step(engine, rows)

    # save: first with an engine that only takes notes
    notes: dict[str, Any] = {}

    def note(save_dir=None, tag=None, client_state=None, **_: Any) -> bool:
        notes.update(folder=str(save_dir), state=client_state)
        return True

    with mock.patch.object(engine, "save_checkpoint", note):
        theirs.save(engine, "mine", 7)
    ask(notes, f"rank {rank} does not call save_checkpoint", "save_everybody")
    ask(notes["folder"] == "mine", f"rank {rank} saves to {notes['folder']}", "other")
    what = f"the client state of rank {rank} is {notes['state']}"
    ask(within(notes, "state", "step") == 7, what, "save_step")
    yield "all ranks save, with the step"
    what = "the universal configuration"
    block = answer_to(theirs.universal, 1, what).get("checkpoint")
    loads = within(block, "load_universal") is True
    ask(loads, f"{what} has {block} for checkpoint", "universal_key")

    ours.save(engine, "reference", 7)
    dist.barrier()
    fresh = ours.make_engine(config)
    step = theirs.resume(fresh, "reference")
    weights = same(list(fresh.module.parameters()), list(engine.module.parameters()), 0.0, 0.0)
    ask(weights, f"rank {rank} has not the weights that were saved", "other")
    moments = moment(fresh) == moment(engine)
    ask(moments, f"rank {rank} has not the moments of before", "resume_states")
    ask(step == 7, f"resume returns {step}, saved was step 7", "resume_step")
    nothing = "no error"
    try:
        theirs.resume(ours.make_engine(config), "nothing")
    except (TypeError, KeyError, AssertionError, ValueError, AttributeError, OSError) as error:
        nothing = type(error).__name__
    what = f"resume from a folder without a checkpoint: {nothing}"
    ask(nothing == "FileNotFoundError", what, "silent_restart")
    yield "training resumes with weights, moments and step"

    # the whole weights, of stage 3 in bf16: the master copies alone have all the bits
    zero = config["zero_optimization"] | {"stage": 3}
    engine = ours.make_engine(ours.in_bf16(config | {"zero_optimization": zero}))
    ours.train_step(engine, rows)
    ours.save(engine, "whole", 1)
    dist.barrier()
    true, found = ours.whole_weights("whole"), theirs.whole_weights("whole")
    what = f"rank {rank} gets"
    ask(isinstance(found, dict), f"{what} a {type(found).__name__}", "whole_weights")
    ask(set(found) == set(true), f"{what} {len(found)} tensors", "whole_weights")
    sizes = sum(found[name].numel() for name in true)
    equal = all(torch.equal(found[name].float(), true[name]) for name in true)
    ask(equal, f"{what} other numbers, {sizes} of them", "whole_weights")
