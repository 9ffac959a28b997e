"""The steps of lab 05: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. What only describes (a configuration, a
formula) is compared with the finished lab's, and a wrong value with those that the common
mistakes give. What runs is run with a real engine behind a spy that takes notes.
"""

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
from torch.distributed.tensor import DTensor

from graders.dsl import Lab, Wrong, allclose, isclose, matching_hint, require, show

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

LAB = Lab()
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
    require(config == before, f"{what} has changed its argument", "config_changed")
    require(isinstance(answer, dict), f"{what} is {show(answer)} and no dict", "config_kind")
    inner, zero = before.pop("zero_optimization"), answer.get("zero_optimization")
    kept = before.items() <= answer.items()
    kept = kept and isinstance(zero, dict) and inner.items() <= zero.items()
    blocks = ((before, answer), (inner, zero if isinstance(zero, dict) else {}))
    lost = [key for old, new in blocks for key in old if new.get(key) != old[key]]
    require(kept, f"{what} lacks the old values of {', '.join(map(repr, lost))}", "config_lost")
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
        "loss_local": [totals[rank] / m, totals[rank] / m / n],
        "loss_sum": [sum(totals), sum(totals) / m, sum(totals) / n, totals[rank]],
        "loss_last": [
            share * lasts for share in (1, 1 / m)
            for lasts in (mine[-1], sum(losses[-1] for losses in each) / n)
        ],
    }  # fmt: skip
    what = f"rank {rank} returns {show(found)}, but the mean loss is {true:.4f}"
    require(not isinstance(found, str), what, "loss_kind")
    require(isclose(found, true, 1e-5), what, matching_hint(found, known, 1e-5, "loss_other"))


def rows_in(x: torch.Tensor, batch: torch.Tensor) -> list[int]:
    """The numbers of these rows in the batch; -1 for a row that is not in it."""
    equal = (x[:, None] == batch[None]).all(-1)
    return [row.nonzero()[0].item() if row.any() else -1 for row in equal]


def judge_rows(rows: list[list[list[int]]], size: int) -> None:
    """Raise `Wrong` unless each row is in one micro-batch of one rank, of this size.

    `rows`: of each rank, of each of its micro-batches.
    """
    of_ranks = [list(itertools.chain(*parts)) for parts in rows]
    named = [
        f"rank {rank} works on {f'rows {in_words(own)}' if own else 'no rows'}"
        for rank, own in enumerate(of_ranks)
    ]
    differ = any(part != of_ranks[0] for part in of_ranks)
    require(differ, f"all ranks work on rows {in_words(of_ranks[0])}", "rows_same")
    whole = sorted(itertools.chain(*of_ranks)) == list(range(24))
    require(whole, " and ".join(named), "rows_lost")
    sizes = sorted({len(part) for parts in rows for part in parts})
    what = f"micro-batches have {', '.join(map(str, sizes))} rows instead of {size}"
    require(sizes == [size], what, "micro_size")


def in_words(rows: list[int]) -> str:
    """Numbers of rows: "0 to 11", or the first of them."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return f"{rows[0]} to {rows[-1]}"
    return ", ".join(map(str, rows[:12])) + ", …" * (len(rows) > 12)


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
def configuration(submission, reference, lesson):
    made: list[dict] = []
    for ranks, micro, batch, stage in CASES:
        what = f"for {ranks} ranks, micro-batch {micro}, batch {batch}, stage {stage}, "
        try:
            config = submission.make_config(ranks, micro, batch, stage)
        except ValueError as error:
            raise Wrong(f"{what}make_config raises ValueError: {error}", "divisible") from error
        require(isinstance(config, dict), f"{what}make_config returns {config}", "config_kind")
        zero = config.get("zero_optimization", {})
        require(isinstance(zero, dict), f"{what}zero_optimization is {zero!r}", "config_kind")
        true = reference.make_config(ranks, micro, batch, stage)
        for key, hint in BATCH_HINTS.items():
            found = config.get(key, true[key])
            require(found == true[key], f"{what}{key} is {found} instead of {true[key]}", hint)
        found = config.get("gradient_accumulation_steps", 1)
        require(isinstance(found, int), f"{what}it accumulates {found!r}", "whole_numbers")
        placed = "stage" in zero and "stage" not in config
        require(placed, f"{what}zero_optimization has no stage", "zero_block")
        ask_known(config, f"{what}the configuration")
        absent = [key for key in BATCH_HINTS if key not in config]
        require(len(absent) < 2, f"{what}{' and '.join(absent)} are missing", "batch_keys")
        found, size = config.get("gradient_clipping"), reference.WIDTH**2
        require(found == reference.CLIP, f"{what}gradient_clipping is {found}", "clip_missing")
        for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
            found = zero.get(key)
            require(found == size, f"{what}{key} is {found} instead of {size}", "bucket")
        sharded = zero.get("stage3_param_persistence_threshold") == 0
        require(sharded, f"{what}small tensors stay whole", "persistence")
        require(zero["stage"] == stage, f"{what}the stage is {zero['stage']}", "other")
        read(config, ranks)
        made.append(config)
    stages = [config["zero_optimization"]["stage"] for config in made]
    what = f"the configuration of stage {CASES[0][3]} has stage {stages[0]} after other calls"
    require(stages == [stage for *_, stage in CASES], what, "shared")
    yield "five configurations are right, and DeepSpeed reads them"
    for ranks, micro, batch, stage in UNCUT:
        case = f"for {ranks} ranks, micro-batch {micro} and batch {batch}, make_config"
        what = f"{case} raises no ValueError"
        try:
            submission.make_config(ranks, micro, batch, stage)
        except ValueError:
            continue
        except Exception as error:
            what = f"{case} raises {type(error).__name__} instead of ValueError"
        raise Wrong(what, "not_divisible")


# --- step 2 -------------------------------------------------------------------------------


class Spy:
    """A real engine that takes notes of what is asked of it."""

    def __init__(self, engine: Any, batch: torch.Tensor, loss: Callable):
        self._engine, self._batch, self._loss = engine, batch, loss
        self._inside, self._last = False, math.nan
        self.events, self.rows, self.ratios = [], [], []
        self._gradients = self._look()

    def _look(self) -> list[torch.Tensor | None]:
        """Copies of the gradients that are kept in the module."""
        grads = [parameter.grad for parameter in self._engine.module.parameters()]
        return [None if grad is None else grad.clone() for grad in grads]

    def _begin(self, name: str, *after: str) -> None:
        """Note a call, which must come after these calls, with the gradients unchanged."""
        words = {each: f"engine.{each}()" for each in ("backward", "step")}
        words["forward"] = "engine(x)"
        last = self.events[-1] if self.events else "nothing"
        known = name == "forward" or "forward" in self.events
        require(known, f"{words[name]} is called, but engine(x) never was", "bypassed")
        good = last in after or last not in ("nothing", *words)
        what = f"{words[name]} is called directly after {words.get(last, last)}"
        require(good, what, "step_each")
        pairs = zip(self._look(), self._gradients, strict=True)
        same_gradients = all(
            a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
        )
        if not same_gradients and "plain" not in self.events:
            self.events.append("gradients")
        self.events.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._begin("forward", "nothing", "step")
        self.rows.append(rows_in(x, self._batch))
        output = self._engine(x)
        self._last = self._loss(output, x).item()
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._begin("backward", "forward")
        self.ratios.append(loss.item() / (self._last or math.nan))
        self._inside = True
        try:
            return self._engine.backward(loss, *args, **kwargs)
        finally:
            self._inside, self._gradients = False, self._look()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin("step", "backward")
        try:
            return self._engine.step(*args, **kwargs)
        finally:
            self._gradients = self._look()

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "zero_grad", "clip_fp32_gradients", "allreduce_gradients"):
            self.events.append(name)
        return getattr(self._engine, name)


@LAB.step(
    2, "the loop belongs to the engine",
    "every row once, backward and step for every micro-batch, the loss of the whole batch",
    "make_engine train_step", world_sizes=(2, 3), symmetric=False,
    crashes={
        "Direct calls to tensor.backward": "plain_backward",
        "requires an optimizer": "optimizer_missing",
    },
)  # fmt: skip
def loop(submission, reference, lesson):
    config = reference.make_config(lesson.world, 24 // (4 * lesson.world), 24, 0)
    made = submission.make_engine(config, "cpu")
    what = f"make_engine returns a {type(made).__name__}"
    require(hasattr(made, "backward"), what, "engine_first")
    optimizer = getattr(made, "optimizer", None)
    require(optimizer is not None, "the engine has no optimizer", "optimizer_missing")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    what = "the optimizer of the engine does not hold the parameters of its model"
    require(held == {id(p) for p in made.module.parameters()}, what, "optimizer_other")
    kind = getattr(optimizer, "optimizer", optimizer)
    rate = optimizer.param_groups[0]["lr"]
    right = isinstance(kind, torch.optim.AdamW) and isclose(rate, reference.LEARNING_RATE)
    what = f"the optimizer is {type(kind).__name__} with the learning rate {rate}"
    require(right, what, "optimizer_other")
    yield "the engine is there, with its optimizer"
    rows = reference.make_batches()[0]
    spy = Spy(reference.make_engine(config, "cpu"), rows, reference.mean_loss)
    real = torch.Tensor.backward

    def backward(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not spy._inside:
            spy.events.append("plain")
            lesson.fact("events", spy.events)
        real(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "backward", backward):
        lesson.fact("returned", number(submission.train_step(spy, rows)))
    for name in ("events", "rows", "ratios"):
        lesson.fact(name, getattr(spy, name))


@loop.explain_hang
def _(group):
    for events in group.facts("events"):
        require("plain" not in (events or ()), "loss.backward() was called", "plain_backward")


@loop.judge
def _(group):
    rows, m = group.facts("rows"), 4
    size = 24 // (m * group.world)
    require(any(rows), "the engine was never called", "bypassed")
    judge_rows(rows, size)
    yield "every row is in one micro-batch of one rank"
    for rank, events in enumerate(group.facts("events")):
        own = [event for event in events if event not in ("forward", "backward", "step")]
        require(own[:1] != ["plain"], f"rank {rank} called loss.backward()", "plain_backward")
        for name in own:
            what = f"rank {rank} used engine.{name}"
            if name == "gradients":
                what = f"rank {rank} changed the gradients between two calls of the engine"
            raise Wrong(what, "own_work")
        for ratio in group.facts("ratios")[rank]:
            what = f"engine.backward got {ratio:.3g} times the loss"
            require(isclose(ratio, 1.0, 1e-5), what, "divided")
        counts = [f"{events.count(name)} times {name}" for name in ("backward", "step")]
        what = f"rank {rank} called {' and '.join(counts)}"
        require(events == ["forward", "backward", "step"] * m, what, "step_each")
    yield "forward, backward and step for every micro-batch"
    batch = LAB.finished.make_batches()[0]
    for rank, found in enumerate(group.facts("returned")):
        judge_loss(rank, found, [[batch[part] for part in parts] for parts in rows])


# --- step 3 -------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "master", "moments")


def wrong_kinds(found: Any, true: dict, case: str) -> Iterator[tuple[str, float, str]]:
    """Each kind that is wrong, its bytes, and the sentence for it."""
    kinds = isinstance(found, dict) and sorted(found) == sorted(KINDS)
    require(kinds, f"for {case}, the result is {show(found)}", "kinds")
    for kind in KINDS:
        if not isclose(held := found[kind], true[kind], 1e-5):
            what = f"for {case}, {kind!r} is {held} bytes per parameter"
            require(not isclose(held, true[kind] * LAB.finished.PSI, 1e-5), what, "kinds")
            yield kind, held, what


@LAB.alone(
    3, "what each rank holds", "parameters, gradients, master copy and moments of all stages",
    "bytes_held",
)  # fmt: skip
def held_in_fp32(submission, reference, lesson):
    for stage, n in itertools.product(range(4), (4, 8)):
        found, true = submission.bytes_held(stage, n), reference.bytes_held(stage, n)
        four, states = [4, 4 / n], [4, 4 / n, 8, 8 / n]
        known = {
            "parameters": {"parameters_stage": four},
            "gradients": {"gradients_stage": four},
            "master": {"master_forgotten": 0, "optimizer_stage": states},
            "moments": {"moments_two": [*four, 12, 12 / n], "optimizer_stage": states},
        }
        for kind, held, what in wrong_kinds(found, true, f"stage {stage} on {n} ranks"):
            require(kind != "master" or stage, what, "master_stage0")
            raise Wrong(what, matching_hint(held, known[kind]))


# --- step 4 -------------------------------------------------------------------------------

SUMS = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))


@LAB.alone(
    4, "bf16, and the 16 bytes again",
    "DeepSpeed reads bf16, and every kind is counted in its precision",
    "in_bf16 bytes_held_bf16",
)  # fmt: skip
def held_in_bf16(submission, reference, lesson):
    for fp32_sum in (False, True):
        what = f"in_bf16 with fp32_sum {fp32_sum}"
        answer = answer_to(lambda config, f=fp32_sum: submission.in_bf16(config, f), 2, what)
        enabled = within(answer, "bf16", "enabled") is True
        require(enabled, f"{what} has {answer.get('bf16')!r} under the key bf16", "bf16_block")
        sums = within(answer, "data_types", "grad_accum_dtype") == "fp32"
        as_asked = fp32_sum == sums and "grad_accum_dtype" not in answer
        found = answer.get("data_types")
        require(as_asked, f"{what} has {found!r} under the key data_types", "sum_key")
        ask_known(answer, what)
        read(answer)
    yield "DeepSpeed reads the configuration as bf16, and sums as asked for"
    for (stage, fp32_sum), n in itertools.product(SUMS, (4, 8)):
        found, true = (
            lab.bytes_held_bf16(stage, n, fp32_sum) for lab in (submission, reference)
        )
        case = f"stage {stage} on {n} ranks" + " with fp32 sums" * fp32_sum
        for kind, held, what in wrong_kinds(found, true, case):
            if kind == "gradients" and fp32_sum:
                raise Wrong(what, "gradients_stage" if held == 4 else "fp32_sum")
            if kind in ("parameters", "gradients"):
                raise Wrong(what, "bf16_two" if held in (4, 4 / n) else f"{kind}_stage")
            require(kind != "master" or held != 0, what, "bf16_master")
            narrow = held in (2, 2 / n, 4, 4 / n) and held < true[kind]
            sharded = isclose(held * n, true[kind], 1e-5)
            raise Wrong(what, "fp32_states" if narrow and not sharded else "optimizer_stage")


# --- step 5 -------------------------------------------------------------------------------


@LAB.step(
    5, "what each rank sends",
    "the bytes of each collective, and the traffic of the paper, counted",
    "bytes_sent as_in_the_paper", world_sizes=(2,), symmetric=False,
)  # fmt: skip
def traffic(submission, reference, lesson):
    kinds = ("all-gather", "reduce-scatter", "reduce", "all-reduce")
    for kind, n in itertools.product(kinds, (4, 8)):
        found, true = submission.bytes_sent(kind, 960, n), reference.bytes_sent(kind, 960, n)
        known = {"sent_once": 2 * true}
        if kind == "all-reduce":
            known = {"all_reduce_twice": true / 2}
        what = f"in a{'n' * kind.startswith('all')} {kind} of 960 bytes among {n} ranks"
        what = f"{what} each sends {true:.0f} bytes, but bytes_sent returns {found}"
        require(isclose(found, true, 1e-5), what, matching_hint(found, known, 1e-5, "fraction"))
    yield "the bytes of every collective"
    answers = []
    for stage in range(4):
        what = f"the configuration of stage {stage}"
        answers.append(answer := answer_to(submission.as_in_the_paper, stage, what))
        ask_known(answer, what)
        all_reduces = answer["zero_optimization"].get("reduce_scatter") is False
        require(not all_reduces, f"{what} has reduce_scatter: false", "paper_scatter")
        reduces = answer["zero_optimization"].get("use_multi_rank_bucket_allreduce") is False
        what = f"{what} does not set use_multi_rank_bucket_allreduce to false"
        require(reduces or stage != 1, what, "paper_reduce")
    n, m = lesson.world, 2
    for stage, formula, hint in ((2, m + 1, "paper_reduce"), (3, 3 * m, "paper_release")):
        units = reference.traffic_of(answers[stage], CPU).in_units()
        what = f"stage {stage} sends {units:.2f} units of (N-1)/N × 4Ψ bytes in a step"
        what = (
            f"{what} of 2 micro-batches on {n} ranks, and the paper's formula gives {formula}"
        )
        require(isclose(units, formula, 1e-5), what, hint)


# --- step 6 -------------------------------------------------------------------------------


@LAB.step(
    6, "the optimizer in host memory",
    "DeepSpeed offloads in stages 1 to 3, with the losses of one process",
    "offloaded", world_sizes=(2,), symmetric=False,
)  # fmt: skip
def offload(submission, reference, lesson):
    what, key, answers = "the configuration", "zero_force_ds_cpu_optimizer", {}
    for stage in (1, 2, 3):
        answer = answer_to(lambda config: submission.offloaded(config, CPU), stage, what)
        zero, answers[stage] = answer["zero_optimization"], answer
        on_top = "offload_optimizer" in answer
        require(not on_top, f"{what} has offload_optimizer at the top", "offload_block")
        block = zero.get("offload_optimizer")
        moved = within(block, "device") == "cpu"
        require(moved, f"in zero_optimization, offload_optimizer is {block}", "offload_what")
        more = "offload_param" in zero
        require(not more, "zero_optimization has offload_param", "offload_what")
        require(key not in zero, f"zero_optimization has {key!r}", "force_cpu_adam")
        refused = answer.get(key) is not False
        require(not refused, "DeepSpeed refuses torch's AdamW for offload", "force_cpu_adam")
        require(not block.get("pin_memory"), "on a CPU, pin_memory is true", "pinned")
        ask_known(answer, what)
    gpu = answer_to(
        lambda config: submission.offloaded(config, torch.device("cuda", 0)), 2, what
    )
    block = within(gpu, "zero_optimization", "offload_optimizer")
    moved = within(block, "device") == "cpu"
    require(moved, f"for a GPU, offload_optimizer is {block}", "offload_what")
    pinned = within(block, "pin_memory") is True
    require(pinned, f"for a GPU, offload_optimizer is {block}", "pinned")
    true = reference.train_alone()[:2]
    for stage in (2, 3):
        engine = reference.make_engine(answers[stage], CPU)
        require(
            engine.zero_use_cpu_optimizer(), f"stage {stage} does not offload", "offload_what"
        )
        losses = [reference.train_step(engine, rows) for rows in reference.make_batches()[:2]]
        words = [reference.in_row(each) for each in (losses, true)]
        what = f"the losses of stage {stage} are {words[0]} instead of {words[1]}"
        require(allclose(losses, true, 1e-5), what, "other")


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
    "shard fsdp_step", world_sizes=(2, 3), symmetric=False,
    crashes={"Invariant encountered": "units"},
)  # fmt: skip
def fsdp(submission, reference, lesson):
    returned = submission.shard(reference.build_model())
    what = f"shard returns a {type(returned).__name__} instead of the model"
    require(isinstance(returned, torch.nn.Module), what, "shard_returned")
    kind = torch.distributed.fsdp.FSDPModule
    units = [name for name, part in returned.named_modules() if isinstance(part, kind)]
    layers = {f"layers.{number}" for number in range(reference.LAYERS)}
    missing = len(layers - set(units))
    require(not missing, f"{missing} of {len(layers)} layers are not separate units", "units")
    require("" in units, "the layers are units, and the model is not", "no_root")
    begin = len(lesson.calls)
    with torch.no_grad():
        returned(reference.make_batches()[0][:1])
    gathers = sum(call.name.startswith("all_gather") for call in lesson.calls[begin:])
    what = f"a forward calls {gathers} all-gathers for {len(layers)} layers"
    require(gathers == len(layers), what, "units")
    kept = sum(not isinstance(p, DTensor) for p in returned.parameters())
    require(kept == 0, f"{kept} layers are still whole after the forward", "reshard")
    yield "every layer is a unit, and so is the whole"

    n, m = lesson.world, 4
    micro = 24 // (m * n)
    for scale in (0.25, 1.0):  # the norm is below the limit, or over it
        rows, alone = reference.make_batches()[0] * scale, reference.build_model()
        reference.mean_loss(alone(rows), rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
        gradient = torch.cat([p.grad.flatten() for p in alone.parameters()])
        model, returned = returned or reference.shard(reference.build_model()), None
        recorder, events, parts = Recorder(model), [], []

        def see(_: Any, inputs: tuple, rows: torch.Tensor = rows, parts: list = parts) -> None:
            parts.append(rows_in(inputs[0], rows))

        model.register_forward_pre_hook(see)
        model.register_forward_pre_hook(lambda *_, e=events: e.append("forward"))
        last = model.layers[-1]
        last.register_full_backward_pre_hook(lambda *_, e=events: e.append("backward"))
        found = submission.fsdp_step(model, recorder, rows, micro)
        lesson.fact("rows", parts)
        steps = len(recorder.gradients)
        require(steps == 1, f"{steps} optimizer steps for one batch", "fsdp_steps")
        clipped = min(1.0, reference.CLIP / (norm + 1e-6))
        known = (
            (clipped, ""), (1.0, "fsdp_clip"), (m, "fsdp_divided"), (1 / n, "fsdp_averaged"),
            (min(m, reference.CLIP / norm), "fsdp_divided"),
            (reference.CLIP / norm, "fsdp_clip"),
        )  # fmt: skip
        given = recorder.gradients[0]
        factor = (
            (given @ gradient / (gradient @ gradient)).item()
            if len(given) == len(gradient)
            else 0.0
        )
        fits = ((f, hint) for f, hint in known if allclose(given, f * gradient, 1e-3))
        multiple = factor > 0.01 and allclose(given, factor * gradient, 1e-3)
        rest = "fsdp_gradient"
        if multiple:
            rest = "fsdp_divided" if scale < 1 else "fsdp_clip"
        factor, hint = next(fits, (factor, rest))
        what = f"the optimizer gets {factor:.3g} times the gradient of the whole batch"
        what = f"{what}, but {clipped:.3g} times is right with clipping"
        if hint == "fsdp_gradient":
            what = "the optimizer does not get the gradient of the whole batch"
        require(not hint, what, hint)
        one = events == ["forward", "backward"] * (len(events) // 2)
        what = "a forward begins before the backward of the micro-batch before it"
        require(one, what, "fsdp_backward")
    yield "the optimizer gets the clipped gradient of the whole batch, once"
    left = any(p.grad is not None and p.grad.any() for p in model.parameters())
    require(not left, "gradients are left after the step", "fsdp_zero")
    judge_loss(lesson.rank, number(found), [part.split(micro) for part in rows.chunk(n)])


@fsdp.judge
def _(group):
    judge_rows(group.facts("rows"), 24 // (4 * group.world))


# --- step 8 -------------------------------------------------------------------------------


def moment(engine: Any) -> float:
    """The sum over this rank's first moments; 0.0 if there are none."""
    states = engine.optimizer.optimizer.state.values()
    return float(sum(state["exp_avg"].double().abs().sum() for state in states if state))


@LAB.step(
    8, "save, and come back",
    "weights, moments and step come back, on every rank and as a whole",
    "save resume whole_weights universal", world_sizes=(2,), symmetric=False,
)  # fmt: skip
def checkpoint(submission, reference, lesson):
    config = reference.make_config(lesson.world, 24 // (2 * lesson.world), 24, 2)
    rows, rank = reference.make_batches()[0], lesson.rank
    engine = reference.make_engine(config)
    reference.train_step(engine, rows)

    # save: first with an engine that only takes notes
    notes: dict[str, Any] = {}

    def note(save_dir=None, tag=None, client_state=None, **_: Any) -> bool:
        notes.update(folder=str(save_dir), state=client_state)
        return True

    with mock.patch.object(engine, "save_checkpoint", note):
        submission.save(engine, "mine", 7)
    require(notes, f"rank {rank} does not call save_checkpoint", "save_everybody")
    require(notes["folder"] == "mine", f"rank {rank} saves to {notes['folder']}", "other")
    what = f"the client state of rank {rank} is {notes['state']}, without step 7"
    state = notes["state"] if isinstance(notes["state"], dict) else {}
    require(7 in state.values(), what, "save_step")
    yield "all ranks save, with the step"
    what = "the universal configuration"
    block = answer_to(submission.universal, 1, what).get("checkpoint")
    loads = within(block, "load_universal") is True
    require(loads, f"{what} has {block} for checkpoint", "universal_key")

    submission.save(engine, "reference", 7)
    dist.barrier()
    fresh = reference.make_engine(config)
    try:
        step = submission.resume(fresh, "reference")
    except FileNotFoundError as error:
        raise Wrong(f"resume raises FileNotFoundError: {error}", "not_found") from error
    weights = allclose(
        list(fresh.module.parameters()), list(engine.module.parameters()), 0.0, 0.0
    )
    require(weights, f"rank {rank} does not have the weights that were saved", "resume_weights")
    moments = moment(fresh) == moment(engine)
    require(moments, f"rank {rank} does not have the moments that were saved", "resume_states")
    require(step == 7, f"resume returns {step}, but step 7 was saved", "resume_step")
    nothing = "no error"
    os.makedirs("nothing", exist_ok=True)
    try:
        submission.resume(reference.make_engine(config), "nothing")
    except (TypeError, KeyError, AssertionError, ValueError, AttributeError, OSError) as error:
        nothing = type(error).__name__
    what = f"resume from an empty folder raises {nothing}"
    require(nothing == "FileNotFoundError", what, "silent_restart")
    yield "training resumes with weights, moments and step"

    # the whole weights, of stage 3 in bf16: the master copies alone have all the bits
    zero = config["zero_optimization"] | {"stage": 3}
    engine = reference.make_engine(reference.in_bf16(config | {"zero_optimization": zero}))
    reference.train_step(engine, rows)
    reference.save(engine, "whole", 1)
    dist.barrier()
    true, found = reference.whole_weights("whole"), submission.whole_weights("whole")
    what = f"whole_weights returns a {type(found).__name__} on rank {rank}"
    require(isinstance(found, dict), what, "whole_weights")
    what = f"whole_weights returns {len(found)} tensors, or other names than the model has"
    require(set(found) == set(true), what, "whole_weights")
    equal = all(torch.equal(found[name].float(), true[name]) for name in true)
    what = f"whole_weights returns values on rank {rank} that are not the saved ones"
    require(equal, what, "whole_weights")
