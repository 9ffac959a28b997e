"""Grade lab 05: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. Configurations and formulas are compared with those of the finished lab. If a value is
wrong, it is compared with the values that common mistakes give. Training loops run with a real
engine inside a spy, which records the calls of its methods.
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
    # the first engine imports these modules; import them here once for all processes
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


# --- functions for several steps ----------------------------------------------------------


def parse(config: dict, ranks: int = 2) -> DeepSpeedConfig:
    """Return the configuration that DeepSpeed parses for this number of ranks."""
    with (
        mock.patch.object(comm, "get_rank", lambda *_: 0),
        mock.patch.object(comm, "get_world_size", lambda *_: ranks),
    ):
        return DeepSpeedConfig(copy.deepcopy(config))


def config_from(call: Callable[[dict], Any], stage: int, what: str) -> dict:
    """Return what `call` returns for the lab's configuration of two ranks.

    Raise `Wrong` if this is not a dict with the old values, or if `call` changes its argument.
    """
    config = LAB.finished.make_config(2, 6, 24, stage)
    before = copy.deepcopy(config)
    answer = call(config)
    require(config == before, f"{what} has changed its argument", "config_changed")
    require(
        isinstance(answer, dict), f"{what} is {show(answer)}, and not a dict", "config_kind"
    )
    inner, zero = before.pop("zero_optimization"), answer.get("zero_optimization")
    is_complete = before.items() <= answer.items()
    is_complete = is_complete and isinstance(zero, dict) and inner.items() <= zero.items()
    blocks = ((before, answer), (inner, zero if isinstance(zero, dict) else {}))
    lost = [key for old, new in blocks for key in old if new.get(key) != old[key]]
    lost = ", ".join(map(repr, lost))
    require(is_complete, f"{what} lacks the old values of {lost}", "config_lost")
    return answer


def value_at(config: Any, *keys: str) -> Any:
    """Return the value at these keys of nested dictionaries, or None if a key is missing."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def require_known_keys(config: dict, what: str) -> None:
    """Raise `Wrong` if a configuration has keys that DeepSpeed does not use."""
    if unknown := LAB.finished.unknown_keys(config):
        raise Wrong(f"{what} has {unknown[0]!r} at the top", "unknown_key")
    if unknown := sorted(set(config["zero_optimization"]) - ZERO_KEYS):
        raise Wrong(f"{what} has {unknown[0]!r} in zero_optimization", "unknown_zero_key")


def number(value: Any) -> float | str:
    """Return a loss as a number, or the name of its type if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def judge_loss(rank: int, found: float | str, parts: list[list[torch.Tensor]]) -> None:
    """Raise `Wrong` unless this rank has returned the mean loss.

    `parts` contains the micro-batches of each rank.
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
            share * last for share in (1, 1 / m)
            for last in (mine[-1], sum(losses[-1] for losses in each) / n)
        ],
    }  # fmt: skip
    what = f"rank {rank} returns {show(found)}, but the mean loss is {true:.4f}"
    require(not isinstance(found, str), what, "loss_kind")
    require(isclose(found, true, 1e-5), what, matching_hint(found, known, 1e-5, "loss_other"))


def rows_in(x: torch.Tensor, batch: torch.Tensor) -> list[int]:
    """Return the numbers of these rows in the batch, or -1 for a row that is not in it."""
    equal = (x[:, None] == batch[None]).all(-1)
    return [row.nonzero()[0].item() if row.any() else -1 for row in equal]


def judge_rows(rows: list[list[list[int]]], size: int) -> None:
    """Raise `Wrong` unless each row is in one micro-batch of one rank.

    `rows` has a list for each rank, which contains the row numbers of each micro-batch. `size`
    is the right size of a micro-batch.
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
    """Return row numbers in words: "0 to 11", or the first twelve numbers."""
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
NOT_DIVISIBLE = ((4, 12, 24, 1), (2, 5, 24, 0))  # (ranks, micro, batch, stage)


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
        wrong = f"{what}gradient_accumulation_steps is {found!r}"
        require(isinstance(found, int), wrong, "whole_numbers")
        is_inside = "stage" in zero and "stage" not in config
        require(is_inside, f"{what}zero_optimization has no stage", "zero_block")
        require_known_keys(config, f"{what}the configuration")
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
        parse(config, ranks)
        made.append(config)
    stages = [config["zero_optimization"]["stage"] for config in made]
    what = f"the configuration of stage {CASES[0][3]} has stage {stages[0]} after other calls"
    require(stages == [stage for *_, stage in CASES], what, "shared")
    yield "five configurations are right, and DeepSpeed accepts them"
    for ranks, micro, batch, stage in NOT_DIVISIBLE:
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
    """An object that calls a real engine, and records the calls."""

    def __init__(self, engine: Any, batch: torch.Tensor, loss: Callable):
        self._engine, self._batch, self._loss = engine, batch, loss
        self._in_backward, self._loss_value = False, math.nan
        self.events, self.rows, self.ratios = [], [], []
        self._gradients = self._copy_gradients()

    def _copy_gradients(self) -> list[torch.Tensor | None]:
        """Return copies of the gradients of the module."""
        grads = [parameter.grad for parameter in self._engine.module.parameters()]
        return [None if grad is None else grad.clone() for grad in grads]

    def _begin(self, name: str, *after: str) -> None:
        """Record a call. Raise `Wrong` unless the call before it is one of `after`.

        If the gradients have changed since the last call, record that as an event, too.
        """
        calls = {each: f"engine.{each}()" for each in ("backward", "step")}
        calls["forward"] = "engine(x)"
        last = self.events[-1] if self.events else "nothing"
        has_forward = name == "forward" or "forward" in self.events
        require(has_forward, f"{calls[name]} is called, but engine(x) never was", "bypassed")
        good = last in after or last not in ("nothing", *calls)
        what = f"{calls[name]} is called directly after {calls.get(last, last)}"
        require(good, what, "step_each")
        pairs = zip(self._copy_gradients(), self._gradients, strict=True)
        same_gradients = all(
            a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
        )
        if not same_gradients and "loss.backward" not in self.events:
            self.events.append("gradients")
        self.events.append(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._begin("forward", "nothing", "step")
        self.rows.append(rows_in(x, self._batch))
        output = self._engine(x)
        self._loss_value = self._loss(output, x).item()
        return output

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self._begin("backward", "forward")
        self.ratios.append(loss.item() / (self._loss_value or math.nan))
        self._in_backward = True
        try:
            return self._engine.backward(loss, *args, **kwargs)
        finally:
            self._in_backward, self._gradients = False, self._copy_gradients()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin("step", "backward")
        try:
            return self._engine.step(*args, **kwargs)
        finally:
            self._gradients = self._copy_gradients()

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
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    what = "the optimizer of the engine does not update the parameters of its model"
    require(updated == {id(p) for p in made.module.parameters()}, what, "optimizer_other")
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
        if not spy._in_backward:
            spy.events.append("loss.backward")
            lesson.fact("events", spy.events)
        real(tensor, *args, **kwargs)

    with mock.patch.object(torch.Tensor, "backward", backward):
        lesson.fact("returned", number(submission.train_step(spy, rows)))
    for name in ("events", "rows", "ratios"):
        lesson.fact(name, getattr(spy, name))


@loop.explain_hang
def _(group):
    for events in group.facts("events"):
        require(
            "loss.backward" not in (events or ()),
            "loss.backward() was called",
            "plain_backward",
        )


@loop.judge
def _(group):
    rows, m = group.facts("rows"), 4
    size = 24 // (m * group.world)
    require(any(rows), "the engine was never called", "bypassed")
    judge_rows(rows, size)
    yield "every row is in one micro-batch of one rank"
    for rank, events in enumerate(group.facts("events")):
        own = [event for event in events if event not in ("forward", "backward", "step")]
        require(
            own[:1] != ["loss.backward"],
            f"rank {rank} called loss.backward()",
            "plain_backward",
        )
        for name in own:
            what = f"rank {rank} used engine.{name}"
            if name == "gradients":
                what = f"rank {rank} changed the gradients between two calls of the engine"
            raise Wrong(what, "own_work")
        for ratio in group.facts("ratios")[rank]:
            what = f"engine.backward got {ratio:.3g} times the loss"
            require(isclose(ratio, 1.0, 1e-5), what, "divided")
        counts = [f"{name} {events.count(name)} times" for name in ("backward", "step")]
        what = f"with {m} micro-batches, rank {rank} called {' and '.join(counts)}"
        require(events == ["forward", "backward", "step"] * m, what, "step_each")
    yield "the engine runs forward, backward and step for every micro-batch"
    batch = LAB.finished.make_batches()[0]
    for rank, found in enumerate(group.facts("returned")):
        judge_loss(rank, found, [[batch[part] for part in parts] for parts in rows])


# --- step 3 -------------------------------------------------------------------------------

KINDS = ("parameters", "gradients", "master", "moments")


def wrong_kinds(found: Any, true: dict, case: str) -> Iterator[tuple[str, float, str]]:
    """Yield each kind whose bytes are wrong, its bytes, and a sentence about it."""
    has_kinds = isinstance(found, dict) and sorted(found) == sorted(KINDS)
    require(has_kinds, f"for {case}, the result is {show(found)}", "kinds")
    for kind in KINDS:
        if not isclose(size := found[kind], true[kind], 1e-5):
            what = f"for {case}, {kind!r} is {size} bytes per parameter"
            require(not isclose(size, true[kind] * LAB.finished.PSI, 1e-5), what, "kinds")
            yield kind, size, what


@LAB.alone(
    3, "what each rank holds", "parameters, gradients, master copy and moments of all stages",
    "bytes_held",
)  # fmt: skip
def bytes_in_fp32(submission, reference, lesson):
    for stage, n in itertools.product(range(4), (4, 8)):
        found, true = submission.bytes_held(stage, n), reference.bytes_held(stage, n)
        values, states = [4, 4 / n], [4, 4 / n, 8, 8 / n]
        known = {
            "parameters": {"parameters_stage": values},
            "gradients": {"gradients_stage": values},
            "master": {"master_forgotten": 0, "optimizer_stage": states},
            "moments": {"moments_two": [*values, 12, 12 / n], "optimizer_stage": states},
        }
        for kind, size, what in wrong_kinds(found, true, f"stage {stage} on {n} ranks"):
            require(kind != "master" or stage, what, "master_stage0")
            raise Wrong(what, matching_hint(size, known[kind]))


# --- step 4 -------------------------------------------------------------------------------

SUMS = ((0, False), (1, False), (2, False), (3, False), (2, True), (3, True))


@LAB.alone(
    4, "bf16, and the 16 bytes again",
    "DeepSpeed reads bf16, and every kind is counted in its precision",
    "in_bf16 bytes_held_bf16",
)  # fmt: skip
def bytes_in_bf16(submission, reference, lesson):
    for fp32_sum in (False, True):
        what = f"in_bf16 with fp32_sum {fp32_sum}"
        answer = config_from(lambda config, f=fp32_sum: submission.in_bf16(config, f), 2, what)
        enabled = value_at(answer, "bf16", "enabled") is True
        require(enabled, f"{what} has {answer.get('bf16')!r} under the key bf16", "bf16_block")
        sums = value_at(answer, "data_types", "grad_accum_dtype") == "fp32"
        is_requested = fp32_sum == sums and "grad_accum_dtype" not in answer
        found = answer.get("data_types")
        require(is_requested, f"{what} has {found!r} under the key data_types", "sum_key")
        require_known_keys(answer, what)
        parse(answer)
    yield "DeepSpeed reads the configuration as bf16, and sums in the requested dtype"
    for (stage, fp32_sum), n in itertools.product(SUMS, (4, 8)):
        found, true = (
            each.bytes_held_bf16(stage, n, fp32_sum) for each in (submission, reference)
        )
        case = f"stage {stage} on {n} ranks" + " with sums in fp32" * fp32_sum
        for kind, size, what in wrong_kinds(found, true, case):
            if kind == "gradients" and fp32_sum:
                raise Wrong(what, "gradients_stage" if size == 4 else "fp32_sum")
            if kind in ("parameters", "gradients"):
                raise Wrong(what, "bf16_two" if size in (4, 4 / n) else f"{kind}_stage")
            require(kind != "master" or size != 0, what, "bf16_master")
            is_narrow = size in (2, 2 / n, 4, 4 / n) and size < true[kind]
            is_sharded = isclose(size * n, true[kind], 1e-5)
            raise Wrong(
                what, "fp32_states" if is_narrow and not is_sharded else "optimizer_stage"
            )


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
        what = f"{what}, each rank sends {true:.0f} bytes, but bytes_sent returns {found}"
        require(isclose(found, true, 1e-5), what, matching_hint(found, known, 1e-5, "fraction"))
    yield "the bytes of every collective are right"
    answers = []
    for stage in range(4):
        what = f"the configuration of stage {stage}"
        answers.append(answer := config_from(submission.as_in_the_paper, stage, what))
        require_known_keys(answer, what)
        is_off = answer["zero_optimization"].get("reduce_scatter") is False
        require(not is_off, f"{what} has reduce_scatter: false", "paper_scatter")
        is_off = answer["zero_optimization"].get("use_multi_rank_bucket_allreduce") is False
        what = f"{what} does not set use_multi_rank_bucket_allreduce to false"
        require(is_off or stage != 1, what, "paper_reduce")
    n, m = lesson.world, 2
    for stage, formula, hint in ((2, m + 1, "paper_reduce"), (3, 3 * m, "paper_release")):
        units = reference.traffic_of(answers[stage], CPU).in_units()
        what = f"in a step of {m} micro-batches on {n} ranks, stage {stage} sends {units:.2f}"
        what = (
            f"{what} units of (N-1)/N × 4Ψ bytes, and the formula of the paper gives {formula}"
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
        answer = config_from(lambda config: submission.offloaded(config, CPU), stage, what)
        zero, answers[stage] = answer["zero_optimization"], answer
        is_outside = "offload_optimizer" in answer
        require(
            not is_outside, f"{what} has offload_optimizer at the top level", "offload_block"
        )
        block = zero.get("offload_optimizer")
        is_offloaded = value_at(block, "device") == "cpu"
        require(
            is_offloaded, f"in zero_optimization, offload_optimizer is {block}", "offload_what"
        )
        has_more = "offload_param" in zero
        require(not has_more, "zero_optimization has offload_param", "offload_what")
        require(key not in zero, f"zero_optimization has {key!r}", "force_cpu_adam")
        is_allowed = answer.get(key) is False
        what_fails = "with this configuration, DeepSpeed does not offload torch's AdamW"
        require(is_allowed, what_fails, "force_cpu_adam")
        require(not block.get("pin_memory"), "for a CPU, pin_memory is true", "pinned")
        require_known_keys(answer, what)
    gpu = config_from(
        lambda config: submission.offloaded(config, torch.device("cuda", 0)), 2, what
    )
    block = value_at(gpu, "zero_optimization", "offload_optimizer")
    is_offloaded = value_at(block, "device") == "cpu"
    require(is_offloaded, f"for a GPU, offload_optimizer is {block}", "offload_what")
    is_pinned = value_at(block, "pin_memory") is True
    require(is_pinned, f"for a GPU, offload_optimizer is {block}", "pinned")
    true = reference.train_alone()[:2]
    for stage in (2, 3):
        engine = reference.make_engine(answers[stage], CPU)
        require(
            engine.zero_use_cpu_optimizer(), f"stage {stage} does not offload", "offload_what"
        )
        losses = [reference.train_step(engine, rows) for rows in reference.make_batches()[:2]]
        found, wanted = (reference.in_row(each) for each in (losses, true))
        what = f"the losses of stage {stage} are {found} instead of {wanted}"
        require(allclose(losses, true, 1e-5), what, "other")


# --- step 7 -------------------------------------------------------------------------------


class Recorder:
    """An optimizer that records the gradients of each step, and changes nothing."""

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
    require("" in units, "the layers are units, but the model is not a unit", "no_root")
    begin = len(lesson.calls)
    with torch.no_grad():
        returned(reference.make_batches()[0][:1])
    gathers = sum(call.name.startswith("all_gather") for call in lesson.calls[begin:])
    what = f"a forward pass calls {gathers} all-gathers for {len(layers)} layers"
    require(gathers == len(layers), what, "units")
    whole = sum(not isinstance(p, DTensor) for p in returned.parameters())
    what = f"after the forward pass, {whole} parameters are still whole"
    require(whole == 0, what, "reshard")
    yield "every layer is a unit, and so is the model"

    n, m = lesson.world, 4
    micro = 24 // (m * n)
    for scale in (0.25, 1.0):  # with 0.25 the norm is below the limit, and with 1.0 above it
        rows, alone = reference.make_batches()[0] * scale, reference.build_model()
        reference.mean_loss(alone(rows), rows).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
        gradient = torch.cat([p.grad.flatten() for p in alone.parameters()])
        model, returned = returned or reference.shard(reference.build_model()), None
        recorder, events, parts = Recorder(model), [], []

        def record_rows(
            _: Any, inputs: tuple, rows: torch.Tensor = rows, parts: list = parts
        ) -> None:
            parts.append(rows_in(inputs[0], rows))

        model.register_forward_pre_hook(record_rows)
        model.register_forward_pre_hook(lambda *_, e=events: e.append("forward"))
        last = model.layers[-1]
        last.register_full_backward_pre_hook(lambda *_, e=events: e.append("backward"))
        found = submission.fsdp_step(model, recorder, rows, micro)
        lesson.fact("rows", parts)
        steps = len(recorder.gradients)
        require(steps == 1, f"the optimizer makes {steps} steps for one batch", "fsdp_steps")
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
        is_multiple = factor > 0.01 and allclose(given, factor * gradient, 1e-3)
        other = "fsdp_gradient"
        if is_multiple:
            other = "fsdp_divided" if scale < 1 else "fsdp_clip"
        factor, hint = next(fits, (factor, other))
        what = f"the optimizer gets {factor:.3g} times the gradient of the whole batch"
        what = f"{what}, but with clipping {clipped:.3g} times is right"
        if hint == "fsdp_gradient":
            what = "the optimizer does not get the gradient of the whole batch"
        require(not hint, what, hint)
        in_order = events == ["forward", "backward"] * (len(events) // 2)
        what = "a forward pass begins before the backward pass of the previous micro-batch"
        require(in_order, what, "fsdp_backward")
    yield "the optimizer gets the clipped gradient of the whole batch, once"
    left = any(p.grad is not None and p.grad.any() for p in model.parameters())
    require(not left, "after the step, the gradients are not None or zero", "fsdp_zero")
    judge_loss(lesson.rank, number(found), [part.split(micro) for part in rows.chunk(n)])


@fsdp.judge
def _(group):
    judge_rows(group.facts("rows"), 24 // (4 * group.world))


# --- step 8 -------------------------------------------------------------------------------


def sum_of_moments(engine: Any) -> float:
    """Return the sum of the magnitudes of this rank's first moments (0.0 without moments)."""
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

    # first call save with an engine that only records the arguments
    recorded: dict[str, Any] = {}

    def record(save_dir=None, tag=None, client_state=None, **_: Any) -> bool:
        recorded.update(folder=str(save_dir), state=client_state)
        return True

    with mock.patch.object(engine, "save_checkpoint", record):
        submission.save(engine, "mine", 7)
    require(recorded, f"rank {rank} does not call save_checkpoint", "save_everybody")
    require(recorded["folder"] == "mine", f"rank {rank} saves to {recorded['folder']}", "other")
    what = f"the client state of rank {rank} is {recorded['state']}, without step 7"
    state = recorded["state"] if isinstance(recorded["state"], dict) else {}
    require(7 in state.values(), what, "save_step")
    yield "all ranks save the step, too"
    what = "the universal configuration"
    block = config_from(submission.universal, 1, what).get("checkpoint")
    loads = value_at(block, "load_universal") is True
    require(loads, f"{what} has {block} under the key checkpoint", "universal_key")

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
    moments = sum_of_moments(fresh) == sum_of_moments(engine)
    require(moments, f"rank {rank} does not have the moments that were saved", "resume_states")
    require(step == 7, f"resume returns {step}, but step 7 was saved", "resume_step")
    raised = "no error"
    os.makedirs("empty", exist_ok=True)
    try:
        submission.resume(reference.make_engine(config), "empty")
    except (TypeError, KeyError, AssertionError, ValueError, AttributeError, OSError) as error:
        raised = type(error).__name__
    what = f"resume from an empty folder raises {raised}"
    require(raised == "FileNotFoundError", what, "silent_restart")
    yield "training resumes with weights, moments and step"

    # the whole weights of stage 3 in bf16; only the master copies have all bits
    zero = config["zero_optimization"] | {"stage": 3}
    engine = reference.make_engine(reference.in_bf16(config | {"zero_optimization": zero}))
    reference.train_step(engine, rows)
    reference.save(engine, "whole", 1)
    dist.barrier()
    true, found = reference.whole_weights("whole"), submission.whole_weights("whole")
    what = f"whole_weights returns a {type(found).__name__} on rank {rank}"
    require(isinstance(found, dict), what, "whole_weights")
    what = f"the names of the {len(found)} tensors of whole_weights are not those of the model"
    require(set(found) == set(true), what, "whole_weights")
    equal = all(torch.equal(found[name].float(), true[name]) for name in true)
    what = f"on rank {rank}, the values that whole_weights returns are not the saved values"
    require(equal, what, "whole_weights")
