"""Grade lab 04: test each step, and choose the hint that fits the mistake.

Each step is graded separately. All functions that a step does not grade come from the finished
lab. If a number is wrong, it is compared with the numbers that common mistakes give. If it
equals one of these, this mistake determines the hint. The order of calls is checked with spies,
which are objects that record the calls of their methods.
"""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # optimizers import it; import it here once for all processes
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graders.dsl import Lab, OperatorRecorder, Wrong, allclose, isclose, matching_hint, require
from graders.rank import Lesson

LAB = Lab(names_rank=True)


def require_result(found: Any, call: str) -> None:
    """Raise `Wrong` if a function of the learner has returned None."""
    require(found is not None, f"{call} returns None", "returns_none")


def require_values(found: Any, true: dict, kind: type | tuple, call: str) -> None:
    """Raise `Wrong` unless `found` is a dict with such values for all keys of `true`."""
    require_result(found, call)
    require(isinstance(found, dict), f"{call} returns a {type(found).__name__}", "dict_kind")
    missing = [name for name in true if not isinstance(found.get(name), kind)]
    require(not missing, f"{call} has no value for {', '.join(missing)}", "dict_kind")


@contextlib.contextmanager
def explain_none_errors(submission: ModuleType, hint: str) -> Iterator[None]:
    """Raise `Wrong` with the line and this hint if the learner's code fails because of None."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == submission.__file__]
        if "NoneType" not in str(error) or not lines:
            raise
        what = f"your code failed: {type(error).__name__}, line {lines[-1]}: {error}"
        raise Wrong(what, hint) from error


# --- step 1 -------------------------------------------------------------------------------

SHAPES = ((5, 10, False), (8, 7, False), (4, 3, True), (5, 2, False), (3, 4, True))


@LAB.alone(
    1, "what a format can hold", "the limits and the spacing of all formats are right",
    "format_numbers spacing",
    crashes={"math domain|positive input|NaN to integer": "spacing_sign"},
)  # fmt: skip
def formats(submission, reference, lesson):
    for e, m, finite in SHAPES:
        what = f"format_numbers({e}, {m}, {finite})"
        found, true = (
            submission.format_numbers(e, m, finite),
            reference.format_numbers(e, m, finite),
        )
        require_values(found, true, (int, float), what)
        ratio = [found[key] / true[key] for key in ("max", "smallest_normal")]
        if ratio[0] == ratio[1] != 1:
            raise Wrong(f"{what}: max is {found['max']:g}, not {true['max']:g}", "bias")
        top, part = true["max"], 2.0**-m
        power = 2.0 ** math.floor(math.log2(top))
        known = {"max_mantissa": power}
        if finite:
            known |= {"nan_code": power * (2 - part), "finite_max": power / 2 * (2 - part)}
            known["finite_max"] = [known["finite_max"], power / 2 * (2 - 2 * part)]
        else:
            known["infinity_code"] = 2 * top
        checks = {
            "max": known,
            "smallest_normal": {"normal_exponent": true["smallest_normal"] / 2},
            "smallest_subnormal": {"subnormal": found["smallest_subnormal"]},
            "eps": {"epsilon": found["eps"]},
        }
        for key, hints in checks.items():
            if found[key] != true[key]:
                wrong = f"{what}: {key} is {found[key]:g}, not {true[key]:g}"
                raise Wrong(wrong, matching_hint(found[key], hints))
    yield "the limits of five formats are right"
    for x in (1.0, 3.0, -3.0, 0.4, 1000.0, 3 * 2.0**-18):
        found, true = submission.spacing(x, 5, 10), reference.spacing(x, 5, 10)
        require_result(found, f"spacing({x:g}, 5, 10)")
        if found != true:
            power = 2.0 ** (math.frexp(x)[1] - 1)
            known = {
                "spacing_subnormal": power * 2.0**-10 if abs(x) < 2**-14 else math.nan,
                "spacing_power": [2 * true, true / 2],
                "spacing_relative": [x * 2.0**-10, abs(x) * 2.0**-10],
            }
            what = f"the spacing of fp16 at {x:g} is {found!r}, not {true:g}"
            raise Wrong(what, matching_hint(found, known))
    for x, e, m in ((2.0**-20, 8, 7), (2.0**-8, 4, 3)):
        found, true = submission.spacing(x, e, m), reference.spacing(x, e, m)
        what = f"spacing({x:g}, {e}, {m}) is {found!r}, not {true:g}"
        require(found == true, what, "spacing_format")


# --- step 2 -------------------------------------------------------------------------------


class NoCast(TorchDispatchMode):
    """A mode that raises `Wrong` if an operator turns a wider floating-point type into bf16."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        wide = any(t.is_floating_point() and t.dtype != torch.bfloat16 for t in given)
        low = isinstance(result, torch.Tensor) and result.dtype == torch.bfloat16
        views = [t.data_ptr() for t in given if t.dtype != torch.bfloat16]
        if wide and low and result.numel() and result.data_ptr() not in views:
            raise Wrong("to_bf16 uses a cast of torch to bf16", "rounding_cast")
        return result


@contextlib.contextmanager
def refuse_casts():
    """Raise `Wrong` if the code in this context casts floating-point numbers to bf16."""

    def tensor(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        if dtype == torch.bfloat16:
            raise Wrong("to_bf16 uses a cast of torch to bf16", "rounding_cast")
        return real(*args, dtype=dtype, **kwargs)

    real = torch.tensor
    with NoCast(), mock.patch.object(torch, "tensor", tensor):
        yield


@LAB.alone(
    2, "round to bf16, by its bits",
    "every number is rounded as by torch's cast, and NaN stays NaN",
    "to_bf16",
)  # fmt: skip
def rounding(submission, reference, lesson):
    generator = torch.Generator().manual_seed(2)
    upper = torch.randint(0x80, 0x7F70, (500,), generator=generator, dtype=torch.int64)
    sign = torch.randint(0, 2, (500,), generator=generator, dtype=torch.int64) << 31
    low = torch.randint(1, 0x8000, (500,), generator=generator, dtype=torch.int64)
    low[:4], upper[:4] = torch.tensor([1, 1, 0x7FFF, 0x7FFF]), 0x3F80 + torch.arange(4)
    upper = (upper << 16) | sign
    small = torch.tensor([0, 1 << 31, 0x10000, 0x8001, 0x18000, 0x7F8000, 0x80400001])
    cases = {
        "numbers of bf16": upper,
        "numbers below a half": upper | low,
        "numbers above a half": upper | (0x8000 + low),
        "ties": upper | 0x8000,
        "zeros and subnormal numbers": small,
        "infinity and the largest": torch.tensor([0x7F800000, 0xFF800000, 0x7F7FFFFF]),
        "NaN": torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000]),
    }
    hints = {
        "zeros and subnormal numbers": "zero_exponent", "numbers below a half": "carry_early",
        "numbers above a half": "truncated", "ties": "ties_odd",
        "infinity and the largest": "infinity",
    }  # fmt: skip
    for name, bits in cases.items():
        x = bits.where(bits < 2**31, bits - 2**32).to(torch.int32).view(torch.float32)
        x = x.view(20, 25) if name == "numbers below a half" else x
        given = x.clone()
        true = x.bfloat16()
        with refuse_casts():
            found = submission.to_bf16(given)
        require_result(found, "to_bf16")
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bfloat16:
            kind = getattr(found, "dtype", type(found).__name__)
            raise Wrong(f"to_bf16 returns {kind}", "bf16_kind")
        if found.shape != true.shape:
            shapes = f"the shape {tuple(found.shape)} for x of shape {tuple(x.shape)}"
            raise Wrong(f"to_bf16 returns {shapes}", "bf16_kind")
        if not torch.equal(given.view(torch.int32), x.view(torch.int32)):
            raise Wrong("to_bf16 has changed its argument", "rounding_in_place")
        if name == "NaN":
            if not found.isnan().all():
                raise Wrong(f"a NaN becomes {found[~found.isnan()][0].item()}", "nan_lost")
            continue
        wrong = found.view(torch.int16) != true.view(torch.int16)
        if wrong.any():
            what = f"{name}: {int(wrong.sum())} of {x.numel()} are wrong"
            away = found.float().abs() > x.abs()
            hint = hints.get(name, "bf16_value" if wrong.all() else "other")
            if name == "ties" and away.all():
                hint = "ties_up"
            raise Wrong(what, hint)
        yield f"{name}: right in every bit"


# --- step 3 -------------------------------------------------------------------------------


def power_of(scale: Any) -> str:
    """Return a scale as a text: a positive number as a power of two, else its repr."""
    if not isinstance(scale, (int, float)) or scale <= 0:
        return repr(scale)
    return f"2^{math.log2(scale):g}"


@LAB.step(
    3, "the gradients that fp16 loses",
    "the fraction that is lost is right, and all ranks have the same scale",
    "share_lost loss_scale", world_sizes=(1, 2),
    crashes={"NoneType": "reduce_none", "negative shift": "scale_below_one"},
)  # fmt: skip
def scale(submission, reference, lesson):
    # 40 zeros; 28 numbers that are lost, 3 of which are exactly half of the smallest number of
    # fp16; 2 numbers of three quarters of it; 20 subnormal and 10 normal numbers. With the
    # scale 64, only 15 numbers are lost.
    sizes = [0.0] * 40 + [2.0**-34] * 15 + [-(2.0**-28)] * 10 + [2.0**-25] * 3
    sizes += [1.5 * 2.0**-25] * 2 + [2.0**-20] * 20 + [0.5] * 10
    g = torch.tensor(sizes)
    for scale, true, known in (
        (1.0, 28 / 60, {
            "share_alive": [28 / 100, 68 / 100, 68 / 60], "share_limit": [30 / 60, 25 / 60],
            "share_subnormal": [50 / 60, 0.9], "share_left": 32 / 60,
        }),
        (64.0, 15 / 60, {
            "share_late": 28 / 60, "share_alive": [0.15, 0.55], "share_left": 45 / 60,
            "share_subnormal": 30 / 60,
        }),
    ):  # fmt: skip
        given = g.clone()
        found = submission.share_lost(given, scale)
        require_result(found, "share_lost")
        if not isclose(found, true):
            hints = known | {"share_percent": [100 * true, 60 * true, 60 * (1 - true)]}
            what = f"with the scale {scale:g} the lost fraction is {found!r}, not {true:.4f}"
            raise Wrong(what, matching_hint(found, hints))
        require(
            allclose(given, g, 0, 0), "share_lost has changed the gradients", "argument_changed"
        )
    yield "the fraction that fp16 loses is right"
    last = lesson.rank == lesson.world - 1
    g = torch.tensor([1e-9, 5e-3, -0.03] if last else [1e-9, 3e-4, 1.5e-3])
    given = g.clone()
    found, true = submission.loss_scale(given), 2.0**21  # times 0.03 it is 62,915
    require_result(found, "loss_scale")
    if not isclose(found, true):
        small = "scale_small" if lesson.world == 1 else "scale_sum"
        known = {"scale_sign": 2.0**23, "scale_up": 2 * true, small: true / 2}
        known |= {} if last else {"scale_own": 2.0**25}
        hint = matching_hint(found, known)
        if isinstance(found, (int, float)) and found > 0 and math.log2(found) % 1:
            hint = "scale_power"
        raise Wrong(f"the scale is {power_of(found)}, not 2^21", hint)
    require(
        allclose(given, g, 0, 0), "loss_scale has changed the gradients", "argument_changed"
    )
    for largest, power, hint in (
        (65504 * 2.0**-30, 30, "scale_limit"),
        (65530 * 2.0**-30, 29, "scale_limit"),
        (-65530 * 2.0**3, -4, "scale_below_one"),
    ):
        found = submission.loss_scale(torch.tensor([1e-9, largest]))
        what = f"the largest gradient is {abs(largest):g}, and the scale is {power_of(found)}"
        require(isclose(found, 2.0**power), f"{what}, not 2^{power}", hint)


# --- step 4 -------------------------------------------------------------------------------


class CountingOptimizer:
    """An optimizer with two groups of parameters, which only counts its steps."""

    def __init__(self, gradients: list):
        parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        self.param_groups, self.steps = two_groups(parameters), 0

    @property
    def gradients(self) -> list[torch.Tensor]:
        return LAB.finished.gradients_of(self)

    def step(self) -> None:
        self.steps += 1

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for each in self.param_groups:
            for parameter in each["params"]:
                parameter.grad = None


def two_groups(parameters: list) -> list[dict[str, Any]]:
    """Return two groups: the first parameter, and all other parameters."""
    return [{"params": parameters[:1]}, {"params": parameters[1:]}]


def make_scaler(submission: ModuleType, value: float = 8.0, **settings: Any) -> Any:
    return submission.Scaler("cpu", value, **settings)


def probe_unscale(submission: ModuleType, lesson: Lesson) -> None:
    scaler = make_scaler(submission)
    optimizer = CountingOptimizer([[8.0, -16.0], None, [0.0, 4.0]])
    scaler.unscale_(optimizer)
    found, true = torch.stack(optimizer.gradients), torch.tensor([[1.0, -2.0], [0.0, 0.5]])
    if not allclose(found, true, 1e-5, 1e-9):
        hint = "all_groups" if allclose(found[0], true[0], 1e-5, 1e-9) else "not_divided"
        become = ", ".join(f"{each:g}" for each in found.flatten().tolist())
        what = f"with a scale of 8, the gradients 8, -16, 0 and 4 become {become}"
        raise Wrong(what, hint)
    if scaler.overflow is None or isinstance(scaler.overflow, torch.Tensor):
        raise Wrong(f"self.overflow is {scaler.overflow!r}", "flag_missing")
    require(
        not scaler.overflow, "all gradients are small, and self.overflow is True", "flag_finite"
    )
    scaler = make_scaler(submission)
    scaler.unscale_(CountingOptimizer([[3e38, 3e38], [3e38, -3e38]]))
    what = "all gradients are 3e38 or -3e38, and self.overflow is True"
    require(not scaler.overflow, what, "flag_finite")
    all_ranks, last_rank = range(lesson.world), [lesson.world - 1]
    hint_of_inf = "nan_missed" if lesson.world == 1 else "flag_sum"
    for value, where, owners, hint in (
        (-math.inf, 2, all_ranks, hint_of_inf),
        (math.nan, 2, all_ranks, "nan_missed"),
        (math.inf, 0, all_ranks, "one_gradient"),
        (math.inf, 1, all_ranks, "one_gradient"),
        (math.inf, 1, last_rank, "flag_own"),
    ):
        gradients = [[1.0, 2.0] for _ in range(3)]
        if lesson.rank in owners:
            gradients[where][0] = value
        scaler = make_scaler(submission)
        optimizer = CountingOptimizer(gradients)
        scaler.unscale_(optimizer)
        if not scaler.overflow:
            which = "all ranks" if owners is all_ranks else f"rank {last_rank[0]}"
            what = f"{value} in gradient {where} of {which}, and overflow is False here"
            raise Wrong(what, hint)
        finite = 2 if where == 0 else 0
        right = allclose(optimizer.gradients[finite], torch.tensor([1.0, 2.0]) / 8)
        what = f"gradient {where} has an overflow, and gradient {finite} was not divided"
        require(right, what, "not_divided")
    no_gradients = lesson.rank == last_rank[0]
    scaler = make_scaler(submission)
    scaler.unscale_(CountingOptimizer([None] if no_gradients else [[math.inf, 1.0]]))
    what = (
        f"rank {last_rank[0]} has no gradients, and self.overflow is {scaler.overflow!r} here"
    )
    require(bool(scaler.overflow) is (lesson.world > 1), what, "no_gradients")


def probe_step(submission: ModuleType) -> None:
    for overflow, is_unscaled in ((False, True), (True, True), (True, False), (False, False)):
        scaler, optimizer = (
            make_scaler(submission),
            CountingOptimizer([[8.0, math.inf if overflow else 1.0]]),
        )
        if is_unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if not is_unscaled and optimizer.gradients[0][0] == 8.0:
            raise Wrong("step() does not unscale the gradients", "step_unscales")
        if overflow and optimizer.steps:
            raise Wrong("the optimizer steps after an overflow", "not_skipped")
        if not overflow and optimizer.steps != 1:
            raise Wrong(f"the optimizer steps {optimizer.steps} times", "never_steps")
        state = scaler.overflow, scaler.value, scaler.good_steps
        what = "after step(), (overflow, value, good_steps) of the scaler is"
        require(state == (overflow, 8.0, 0), f"{what} {state}", "step_updates")


def probe_update(submission: ModuleType) -> None:
    scaler, true = (make_scaler(m, 2.0, growth_interval=3) for m in (submission, LAB.finished))
    for flag in (0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        before = true.value, true.good_steps
        scaler.value, scaler.good_steps = before
        for each in (scaler, true):
            each.overflow = bool(flag)
            each.update()
        what = "an overflow" if flag else f"good step {before[1] + 1} of 3"
        what = f"after {what} the scale goes from {before[0]:g} to {scaler.value:g}"
        what = f"{what}, and good_steps is {scaler.good_steps}"
        if scaler.value != true.value:
            raise Wrong(what, "backoff" if flag else "growth")
        if scaler.good_steps != true.good_steps:
            raise Wrong(what, "count_kept" if flag else "growth")
        if scaler.overflow is not None:
            raise Wrong(f"after update() overflow is {scaler.overflow}", "verdict_kept")


class SpyScaler:
    """A scaler that records its calls, and the norm of the gradients that step() gets."""

    def __init__(self, events: list[str], value: float = 64.0):
        self.events, self.value, self.norm = events, value, math.nan
        self.in_step = False  # step() is running
        self.scaled: list[torch.Tensor] = []  # the gradients that unscale_ got

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.events.append("scale")
        return loss * self.value

    def unscale_(self, optimizer: Any) -> None:
        self.events.append("unscale_")
        self.scaled = [gradient.clone() for gradient in LAB.finished.gradients_of(optimizer)]
        for gradient in LAB.finished.gradients_of(optimizer):
            gradient.div_(self.value)

    def step(self, optimizer: Any) -> None:
        if "unscale_" not in self.events:
            self.unscale_(optimizer)
        self.events.append("step")
        gradients = LAB.finished.gradients_of(optimizer)
        self.norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        self.in_step = True
        optimizer.step()
        self.in_step = False

    def update(self) -> None:
        self.events.append("update")


class SpyOptimizer(CountingOptimizer):
    """An optimizer that records its gradients, and steps outside of the scaler."""

    def __init__(self, scaler: SpyScaler, events: list[str], parameters: list):
        self.param_groups, self.steps = two_groups(parameters), 0
        self.scaler, self.events = scaler, events
        self.used: list[torch.Tensor] = []  # the gradients in the last step

    def step(self) -> None:
        self.steps += 1
        self.used = [gradient.clone() for gradient in self.gradients]
        if not self.scaler.in_step:
            self.events.append("optimizer")


@LAB.step(
    4, "a scaler that finds the scale",
    "an overflow on any rank skips the step, the scale falls and grows, and clipping is in "
    "its place",
    "Scaler scaled_step", world_sizes=(1, 2),
    crashes={
        "called twice since": "unscaled_twice", "non-empty TensorList": "no_gradients",
        "'SpyScaler' object has no": "torch_scaler", "NoneType": "reduce_none",
    },
)  # fmt: skip
def scaler(submission, reference, lesson):
    probe_unscale(submission, lesson)
    yield "gradients are unscaled, and every rank detects an overflow on any rank"
    probe_step(submission)
    yield "the optimizer steps, or skips the step after an overflow"
    probe_update(submission)
    yield "the scale falls and grows as it should"
    true = math.sqrt(20)
    for limit, norm in ((0.5, 0.5), (2 * true, true)):
        events: list[str] = []
        weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        scaler = SpyScaler(events)
        optimizer = SpyOptimizer(scaler, events, [weight])
        submission.scaled_step(
            scaler, optimizer, weight.square().sum(), limit
        )  # gradient (2, 4)
        judge_events(events, scaler)
        if weight.grad is not None and weight.grad.any():
            raise Wrong("after the step, the gradients are not None or zero", "not_zeroed")
        if not isclose(scaler.norm, norm, 1e-3):
            known = {"clip_before": [0.5 / 64], "clip_missing": true, "no_gradient": 0.0}
            known["clip_value"] = math.sqrt(0.5)
            if norm == true:
                known = {"clip_before": [2 * true / 64], "clip_always": scaler.norm}
            what = f"with a limit of {limit:.4f}, the gradients have the norm {scaler.norm:.4f}"
            what = f"{what} in the step, not {norm:.4f}"
            raise Wrong(what, matching_hint(scaler.norm, known, 1e-3, "clip_limit"))


def judge_events(events: list[str], scaler: SpyScaler) -> None:
    """Raise `Wrong` if a call of the scaler is missing, or if update() precedes step()."""
    what = f"the calls are {', '.join(events) or 'none'}"
    if "scale" not in events:
        raise Wrong(what, "loss_not_scaled")
    if "optimizer" in events or "step" not in events:
        raise Wrong(what, "own_step")
    if "update" not in events:
        raise Wrong(what, "update_missing")
    if events.index("update") < events.index("step"):
        raise Wrong(what, "update_first")


# --- step 5 -------------------------------------------------------------------------------

OUTPUTS = {
    "norm": "norm_fp32", "linear": "matmul_low", "scores": "matmul_low", "mixed": "matmul_low",
    "softmax": "softmax_kind", "gelu": "no_list", "scaled": "no_list", "residual": "widest",
    "cat": "widest", "double": "float64", "loss": "loss_list", "island": "island",
}  # fmt: skip


@LAB.alone(
    5, "autocast",
    "the dtypes are predicted, two functions work under autocast, and the loss is in fp32",
    "output_dtypes make_product make_squares loss_under_autocast",
    crashes={
        "invalid gradient at|incorrect number of grad": "product_gradient",
        "forward\\(\\) takes|backward\\(\\) takes": "function_ctx",
        "keyword-only argument: 'device_type'": "device_type",
        "cannot be multiplied": "product_forward",
        "same dtype|_fwd_used_autocast|_dtype'": "no_custom_bwd",
        "does not require grad": "loss_graph",
    },
)  # fmt: skip
def autocast(submission, reference, lesson):
    for kind in ("cpu", "cuda"):
        for low in (torch.bfloat16, torch.float16):
            found, true = (
                submission.output_dtypes(kind, low),
                reference.output_dtypes(kind, low),
            )
            require_values(found, true, torch.dtype, "output_dtypes")
            for name, hint in OUTPUTS.items():
                if found[name] != true[name]:
                    what = (
                        f"with {low} on {kind}, output_dtypes returns {found[name]} for {name}"
                    )
                    raise Wrong(what, hint)
    yield "the dtypes of the twelve outputs are right, on a CPU and on a GPU"
    judge_product(submission.make_product("cpu"))
    yield "the product and its gradients are right, in autocast and outside"
    judge_squares(submission.make_squares("cpu"))
    yield "the sum of squares is in fp32"

    recorded: dict[str, Any] = {}

    class Spy(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            on = torch.is_autocast_enabled("cpu")
            recorded["forward"] = torch.get_autocast_dtype("cpu") if on else None
            return super().forward(rows)

    def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        recorded["loss"] = (torch.is_autocast_enabled("cpu"), output.dtype)
        return reference.mean_loss(output, rows)

    submission.mean_loss = mean_loss
    model, rows = Spy(reference.WIDTH, reference.WIDTH), reference.make_batches()[0]
    for low in (torch.float16, torch.bfloat16, None):
        recorded.clear()
        loss = submission.loss_under_autocast(model, rows, low)
        require_result(loss, "loss_under_autocast")
        ran = recorded.get("forward")
        if low is not None and ran is None:
            raise Wrong("the model runs without autocast", "forward_outside")
        if ran != low:
            raise Wrong(f"with low={low}, the model runs in {ran}", "low_ignored")
        inside, dtype = recorded.get("loss", (False, torch.float32))
        if inside:
            raise Wrong("mean_loss runs under autocast", "loss_inside")
        kind = type(loss).__name__
        require(
            isinstance(loss, torch.Tensor),
            f"loss_under_autocast returns a {kind}",
            "loss_graph",
        )
        if dtype != torch.float32 or loss.dtype != torch.float32:
            raise Wrong(f"mean_loss is computed from {dtype}", "loss_low")
        true = reference.loss_under_autocast(model, rows, low).item()
        what = f"with {low} the loss is {loss.item():.6f}, not {true:.6f}"
        require(isclose(loss.item(), true, 1e-5), what, "loss_value")
        model.zero_grad()
        loss.backward()


def require_function(function: Any, name: str) -> None:
    """Raise `Wrong` unless `function` has the method `apply`, as a torch.autograd.Function."""
    require_result(function, name)
    what = f"{name} returns {type(function).__name__}, which has no method apply"
    require(hasattr(function, "apply"), what, "function_kind")


def judge_product(product: Any) -> None:
    """Raise `Wrong` unless this Function is a product, with and without autocast."""
    require_function(product, "make_product")
    torch.manual_seed(5)
    x, w, g = torch.randn(3, 4), torch.randn(2, 4), torch.randn(3, 2)
    for low in (None, torch.float16, torch.bfloat16):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        with torch.autocast("cpu", low) if low else contextlib.nullcontext():
            y = product.apply(a, b)
        require_result(y, "forward of the product")
        where = f"under autocast to {low}" if low else "outside of autocast"
        if y.dtype != (low or torch.float32):
            hint = "product_fp32" if y.dtype == torch.float32 else "product_cast"
            raise Wrong(f"{where} the dtype of the product is {y.dtype}", hint)
        right = y.shape == (3, 2) and (y - x @ w.T).norm() < 0.03 * (x @ w.T).norm()
        require(right, f"{where} the product is not x weightᵀ", "product_forward")
        y.backward(g.to(y.dtype))
        for name, argument, true in (("x", a, g @ w), ("weight", b, g.T @ x)):
            found = argument.grad
            if found is None or not (found - true).norm() < 0.02 * true.norm():
                raise Wrong(f"{where} the gradient of {name} is wrong", "product_gradient")


def judge_squares(squares: Any) -> None:
    """Raise `Wrong` unless this Function is a sum of squares in fp32."""
    require_function(squares, "make_squares")
    with torch.autocast("cpu", torch.float16):
        x = torch.tensor([300.0, -1.0], dtype=torch.float16, requires_grad=True)
        y = squares.apply(x)
    require_result(y, "forward of the squares")
    what = f"for 300 and -1 apply(x) is {y.tolist()}, of {y.dtype}"
    require(y.dtype == torch.float32 and y.isfinite().all(), what, "squares_range")
    require(y.shape == () and isclose(y.item(), 90001.0), f"{what}, not 90001", "squares_sum")
    (y / 8).backward()
    what = (
        f"the gradient of the sum of squares of 300 and -1, divided by 8, is {x.grad.tolist()}"
    )
    require(allclose(x.grad, torch.tensor([75.0, -0.25]), 1e-5, 1e-9), what, "squares_gradient")


# --- step 6 -------------------------------------------------------------------------------


@LAB.alone(
    6, "weights that bf16 cannot keep",
    "the master weights are those of training in fp32, and every byte is counted",
    "MasterAdam bytes_per_parameter",
    crashes={
        "non-leaf": "master_leaf", "assign|same dtype|grad_dtype": "gradient_type",
        "empty parameter list": "iterable_once",
    },
)  # fmt: skip
def master(submission, reference, lesson):
    torch.manual_seed(6)
    starts = [torch.linspace(0.5, 1.0, 16).bfloat16(), torch.linspace(-1, -0.5, 4).bfloat16()]
    parameters = [nn.Parameter(start.clone()) for start in starts]
    optimizer = submission.MasterAdam((parameter for parameter in parameters), lr=2e-3)
    masters, inner = getattr(optimizer, "master", None), getattr(optimizer, "inner", None)
    what = f"self.master is a {type(masters).__name__}"
    require(isinstance(masters, (list, tuple, nn.ParameterList)), what, "master_fp32")
    require(
        len(masters), "self.master is empty, although there are two parameters", "iterable_once"
    )
    kinds = [str(getattr(m, "dtype", m)) for m in masters]
    what = f"for two parameters, self.master contains {', '.join(kinds)}"
    require(kinds == ["torch.float32"] * 2, what, "master_fp32")
    equal = all(map(allclose, masters, starts))
    require(equal, "the copies are not equal to the parameters", "master_fp32")
    updated = [p for group in getattr(inner, "param_groups", []) for p in group["params"]]
    for copy in masters:
        is_updated = any(p is copy for p in updated)
        require(
            is_updated,
            "self.inner is not an optimizer of the copies in self.master",
            "inner_wrong",
        )
    settings = inner.param_groups[0]
    is_default = settings.get("weight_decay") == 0 and settings.get("betas") == (0.9, 0.999)
    kind = f"self.inner is {type(inner).__name__} with lr = {settings['lr']:g}"
    is_adam = isinstance(inner, torch.optim.Adam) and is_default
    require(
        is_adam and settings["lr"] == 2e-3, f"{kind}, not Adam with lr = 0.002", "inner_wrong"
    )
    yield "there are copies in fp32, and an Adam updates them"
    true, stale = ([s.float().clone().requires_grad_() for s in starts] for _ in range(2))
    adams = [torch.optim.Adam(copies, lr=2e-3) for copies in (true, stale)]
    for _ in range(20):
        for p, exact, read in zip(parameters, true, stale, strict=True):
            p.grad = (torch.rand(p.shape) + 0.5).bfloat16()
            exact.grad = read.grad = p.grad.float()
            read.data = (
                read.data.bfloat16().float()
            )  # the mistake: each step starts from the parameters
        given = [p.grad.clone() for p in parameters]
        optimizer.step()
        for adam in adams:
            adam.step()
        for p in parameters:
            what = f"a parameter is in {p.dtype} after step()"
            require(p.dtype == torch.bfloat16, what, "parameter_type")
    left = [copy.grad for copy in optimizer.master if copy.grad is not None]
    for p, master, exact, read, start, gradient in zip(
        parameters, optimizer.master, true, stale, starts, given, strict=True
    ):
        if not allclose(master, exact.detach(), 1e-5, 1e-9):
            if torch.equal(master.float(), start.float()):
                raise Wrong("20 steps do not change the copy", "gradient_missing")
            rounded = torch.equal(master.float(), master.bfloat16().float())
            rounded = rounded or allclose(master, read.detach(), 1e-5, 1e-9)
            hint = "master_overwritten" if rounded else "other"
            raise Wrong("after 20 steps the copy is not that of Adam in fp32", hint)
        if not torch.equal(p.detach(), exact.detach().bfloat16()):
            raise Wrong(
                "the parameters do not equal the copies, rounded to bf16", "not_copied_back"
            )
        is_unchanged = p.grad is not None and allclose(p.grad, gradient, 0, 0)
        what = "step() changes the gradient of a parameter"
        require(is_unchanged, what, "gradient_gone")
    if left:
        what = f"after step(), a copy has a gradient of {left[0].itemsize} bytes per number"
        raise Wrong(what, "gradient_kept")
    yield "after 20 steps, the parameters are the fp32 weights, rounded to bf16"
    for recipe in ("fp32", "bf16", "master"):
        found, true = (
            submission.bytes_per_parameter(recipe),
            reference.bytes_per_parameter(recipe),
        )
        require_values(found, true, (int, float), f"bytes_per_parameter({recipe!r})")
        for kind, hint in (
            ("parameters", "bytes_16"),
            ("gradients", "bytes_16"),
            ("master", "bytes_master"),
            ("moments", "bytes_moments"),
        ):
            if found[kind] != true[kind]:
                what = f"recipe {recipe}: {kind} are {found[kind]} bytes, not {true[kind]}"
                raise Wrong(what, hint)


# --- step 7 -------------------------------------------------------------------------------


def types_sent(call: Callable[[], Any]) -> set[str]:
    """Return the dtypes of all tensors that are sent by collectives during a call."""
    with OperatorRecorder() as watch:
        call()
    parts = ("reduce", "gather", "alltoall", "all_to_all", "broadcast_", "send")
    return {dtype for name, dtype in watch.operators if any(part in name for part in parts)}


def with_gradients(*gradients: float | None) -> list[nn.Parameter]:
    """Return parameters of three numbers with these gradients. The last one is in bf16."""
    parameters = [nn.Parameter(torch.zeros(3)) for _ in gradients]
    parameters[-1] = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            parameter.grad = torch.full_like(parameter, gradient).detach()
    return parameters


@LAB.step(
    7, "on the wire", "the mean, its error against float64, and the number of bytes are right",
    "average_gradients reduction_error bytes_sent", world_sizes=(3, 2),
    crashes={"NoneType": "none_gradient", "assign a gradient|grad_dtype": "own_type"},
)  # fmt: skip
def reduction(submission, reference, lesson):
    judge_average(submission, lesson)
    yield "the mean is right, and it was sent in the requested dtype"
    judge_error(submission, lesson)
    yield "the error against float64 is right"
    judge_bytes_sent(submission, lesson.world)


def judge_average(submission: ModuleType, lesson: Lesson) -> None:
    """Raise `Wrong` unless gradients are averaged. Those of the ranks are 3, 5 and 7."""
    n, own = lesson.world, 2.0 * lesson.rank + 3
    mean = n + 2.0
    with explain_none_errors(submission, "reduce_none"):
        submission.average_gradients(with_gradients(own, own), torch.float32)
    for wire in (torch.float32, torch.bfloat16, torch.float16):
        parameters = with_gradients(own, None, own)
        types = types_sent(lambda p=parameters, w=wire: submission.average_gradients(p, w))
        if types - {str(wire)}:
            what = f"with wire={wire}, the dtype that was sent is {', '.join(sorted(types))}"
            raise Wrong(what, "wire_type")
        require(
            parameters[1].grad is None,
            "a gradient that was None is now a tensor",
            "none_gradient",
        )
        for parameter in (parameters[0], parameters[2]):
            found = parameter.grad.float().mean().item()
            if not isclose(found, mean, 0.02):
                what = f"sent as {wire}, the mean is {found:.4g}, not {mean:g}"
                known = {"not_written": own, "not_reduced": own / n}
                known["average_divisor"] = [mean * n, mean / n, (2 * n + 1) / n]
                has_reduce = any(call.name == "reduce" for call in lesson.calls)
                other = "not_reduced" if has_reduce else "other"
                raise Wrong(what, matching_hint(found, known, 0.02, other))
            if parameter.grad.dtype != parameter.dtype:
                what = f"sent as {wire}, a gradient in {parameter.dtype} is"
                raise Wrong(f"{what} now in {parameter.grad.dtype}", "own_type")
    parameters = with_gradients(own, own)
    submission.average_gradients(iter(parameters), torch.float32)
    found = [parameter.grad.float().mean().item() for parameter in parameters]
    right = all(isclose(each, mean, 0.02) for each in found)
    what = f"for a generator of parameters, the means are {found}, not {mean:g}"
    require(right, what, "iterable_once")
    for gradient, what in (
        (60_000.0, "60,000 on every rank has"),
        (
            100_000.0 if lesson.rank == 0 else 0.0,
            "100,000 on rank 0 and 0 on the other ranks have",
        ),
    ):
        parameters = with_gradients(gradient, gradient)
        submission.average_gradients(parameters, torch.float16)
        finite = parameters[0].grad.isfinite().all()
        require(finite, f"in fp16, {what} an infinite mean", "divided_late")


def judge_error(submission: ModuleType, lesson: Lesson) -> None:
    """Raise `Wrong` unless the error of a mean is measured against float64."""
    n, generator = lesson.world, torch.Generator().manual_seed(lesson.rank)
    own = torch.randn(1000, generator=generator)
    true = own.double()
    dist.all_reduce(true)
    true /= n
    inexact = true.float()
    inexact[::2] *= 1.02
    for what, mean in (("off by 2% in part", inexact), ("exact in fp32", true.float())):
        given = own.clone()
        with explain_none_errors(submission, "reduce_none"):
            found = submission.reduction_error(mean, given)
        require_result(found, "reduction_error")
        error = ((mean.double() - true).norm() / true.norm()).item()
        if not isclose(found, error, 1e-3):
            absolute = (mean.double() - true).norm().item()
            against = [own.double(), own.double() / n, true * n]
            mistaken = [((mean.double() - a).norm() / a.norm()).item() for a in against]
            known = {"error_own": [*mistaken, 0.0], "error_ratio": absolute}
            hint = matching_hint(
                found, known if what != "exact in fp32" else {}, 1e-3, "error_ratio"
            )
            hint = "error_fp32" if what == "exact in fp32" else hint
            what = f"the error of a mean that is {what} is {found!r}"
            raise Wrong(f"{what}, not {error:.3g}", hint)
        what = "reduction_error has changed `own`"
        require(allclose(given, own, 0, 0), what, "argument_changed")


def judge_bytes_sent(submission: ModuleType, n: int) -> None:
    """Raise `Wrong` unless the bytes of an all-reduce are right."""
    wires = (torch.float32, torch.bfloat16, torch.float64)
    found = [submission.bytes_sent(1200, 4, wire) for wire in wires]
    require_result(found[0], "bytes_sent")
    for wire, each in zip(wires, found, strict=True):
        true = 1800.0 * wire.itemsize
        if not isclose(each, true):
            what = f"for 1,200 numbers on 4 ranks as {wire}: {each!r} bytes, not {true:g}"
            with_world = 2400 * (n - 1) / n * wire.itemsize
            known = {"sent_twice": true / 2, "sent_world": with_world, "sent_size": 8 * true}
            are_equal = found[0] == found[1]
            hint = "sent_size" if are_equal else matching_hint(each, known, other="sent_parts")
            raise Wrong(what, hint)


# --- step 8 -------------------------------------------------------------------------------


def flat(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return all gradients in one vector."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def clipped(gradients: torch.Tensor, limit: float) -> torch.Tensor:
    """Return the gradients, scaled to a norm of at most this limit."""
    return gradients * min(1.0, limit / gradients.norm().item())


def averaged(own: torch.Tensor) -> torch.Tensor:
    """Return the mean over all ranks."""
    mean = own.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two vectors are equal, apart from rounding in fp32."""
    return a.shape == b.shape and bool((a - b).norm() <= 1e-4 * b.norm())


@LAB.step(
    8, "three precisions, one loss",
    "the step is right in three precisions, and every byte is predicted",
    "train_step bytes_held", world_sizes=(2,), crashes={"NoneType": "reduce_none"},
)  # fmt: skip
def training(submission, reference, lesson):
    share = reference.BATCH // lesson.world
    batch = reference.make_batches()[0][lesson.rank * share :][:share]
    # the gradients of rows times 4 are clipped, and those of rows times 1 are not
    for low, scaled, times in (
        (None, False, 4.0), (torch.float16, True, 4.0), (torch.bfloat16, False, 1.0),
    ):  # fmt: skip
        judge_training_step(submission, lesson, low, scaled, times * batch)
        if low != torch.float16:
            continue
        yield "the gradients are right, with a scaler and without"
    judge_bytes_held(submission)


def judge_training_step(
    submission: ModuleType,
    lesson: Lesson,
    low: torch.dtype | None,
    scaled: bool,
    rows: torch.Tensor,
) -> None:
    """Raise `Wrong` unless the calls, the gradients and the result of one step are right."""
    reference, events = LAB.finished, []
    passed: dict[str, Any] = {}
    model = reference.build_model()
    parameters = list(model.parameters())
    scaler = SpyScaler(events)
    scaler.overflow = False
    optimizer = SpyOptimizer(scaler, events, parameters)
    parameters[-1].register_hook(lambda _: events.append("backward"))

    def forward(model, rows, low):
        events.append("forward")
        passed["low"] = low
        return reference.loss_under_autocast(model, rows, low)

    def average(parameters, wire):
        events.append("average")
        passed["wire"] = wire
        reference.average_gradients(parameters, wire)

    real_clip = nn.utils.clip_grad_norm_

    def clip(*args, **kwargs):
        events.append("clip")
        return real_clip(*args, **kwargs)

    submission.loss_under_autocast, submission.average_gradients = forward, average
    with (
        mock.patch.object(nn.utils, "clip_grad_norm_", clip),
        mock.patch.object(submission, "clip_grad_norm_", clip, create=True),  # imported by name
    ):
        returned = submission.train_step(
            model, optimizer, scaler if scaled else None, rows, low
        )
    order = [each for i, each in enumerate(events) if each != (events[i - 1] if i else None)]
    what = f"{'with' if scaled else 'without'} a scaler the order is {', '.join(order)}"
    require(passed.get("low", low) == low, f"with low={low}, forward gets {passed.get('low')}",
        "low_ignored")  # fmt: skip
    if scaled:
        judge_events(events, scaler)
    require(optimizer.steps == 1, f"the optimizer steps {optimizer.steps} times", "never_steps")
    wire = passed.get("wire", torch.float32)
    require(wire == torch.float32, f"gradients are averaged in {wire}", "average_low")
    judge_gradients(reference, scaler if scaled else None, optimizer, rows, low, what)
    if not any(p.grad is not None and p.grad.any() for p in parameters):
        raise Wrong("after the step, all gradients are None or zero", "gradients_gone")
    require_result(returned, "train_step")
    mean = averaged(
        reference.loss_under_autocast(reference.build_model(), rows, low).detach()
    ).item()
    what = f"train_step returns {returned!r}, but the mean loss is {mean:.5f}"
    require(isclose(returned, mean, 1e-5), what, "loss_own")


def judge_gradients(
    reference: ModuleType, scaler: SpyScaler | None, optimizer: SpyOptimizer,
    rows: torch.Tensor, low: torch.dtype | None, order: str,
) -> None:  # fmt: skip
    """Raise `Wrong` unless the optimizer used the clipped mean of the gradients."""
    scale, events = 1.0 if scaler is None else scaler.value, optimizer.events
    model = reference.build_model()
    (reference.loss_under_autocast(model, rows, low) * scale).backward()
    own = flat(p.grad for p in model.parameters())
    mean = averaged(own)
    limit = reference.CLIP
    local, best = averaged(clipped(own / scale, limit)), clipped(mean / scale, limit)
    if not optimizer.used or not any(gradient.any() for gradient in optimizer.used):
        raise Wrong("in the step, all gradients are zero or None", "no_gradient")
    used = flat(optimizer.used)
    if scaler is not None and not equal(flat(scaler.scaled), mean):
        if equal(flat(scaler.scaled), own) and "average" in scaler.events:
            raise Wrong(order, "unscale_early")
        if "clip" in scaler.events[: scaler.events.index("unscale_")]:
            raise Wrong(order, "clip_before")
    if equal(used, best):
        return
    known = {
        "clip_missing": [mean / scale], "clip_local": [local, clipped(local, limit)],
        "not_averaged": [own / scale, clipped(own / scale, limit)],
        "clip_value": [(mean / scale).clamp(-limit, limit)],
    }  # fmt: skip
    if mean.norm() / scale <= limit:
        same_direction = torch.cosine_similarity(used, mean, dim=0) > 0.999
        known["clip_always"] = [used] if same_direction and used.norm() < limit * 1.001 else []
        known["gradients_differ"] = [2 * mean / scale]
        known["clip_missing"] = []
    else:
        same_direction = torch.cosine_similarity(used, mean, dim=0) > 0.999
        known["clip_limit"] = [used] if same_direction else []
    hints = (
        name for name, each in known.items() if any(equal(used, mistake) for mistake in each)
    )
    hint = next(hints, "gradients_differ")
    hint = hint if events.count("backward") == 1 else "gradients_differ"
    error = ((used - best).norm() / best.norm()).item() if used.shape == best.shape else 1.0
    what = f"in the step, the gradients differ from the right ones by {error:.0%} of their norm"
    raise Wrong(f"{what}, and {order}", hint)


def judge_bytes_held(submission: ModuleType) -> None:
    """Raise `Wrong` unless every byte of a training step is predicted."""
    reference = LAB.finished
    for low, size in ((None, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        found, true = submission.bytes_held(low, 6), reference.bytes_held(low, 6)
        require_values(found, true, (int, float), "bytes_held")
        unit, rows = 6 * reference.WIDTH * reference.LAYERS, 6 * reference.LAYERS
        first = 4 * unit + 8 * rows
        held = true["activations"]
        known = {
            "held_norm": [held - 8 * rows, held - 2 * rows * (4 - size), held - 4 * rows]
            + [held - part * unit for part in (2, 4)],
            "held_layers": held / reference.LAYERS,
            "held_rows": [held * 2, held * 4, held / 6],
        }
        assert held == first + 9 * size * unit
        hints = dict.fromkeys(("parameters", "gradients", "moments"), "held_fp32")
        hints["casts"] = "held_casts"
        hints["activations"] = matching_hint(found["activations"], known, other="held_products")
        for kind, hint in hints.items():
            if found[kind] != true[kind]:
                what = f"in {low or 'fp32'} with 6 rows, bytes_held returns"
                raise Wrong(f"{what} {found[kind]} bytes of {kind}, not {true[kind]}", hint)
