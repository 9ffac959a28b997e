"""The steps of lab 04: what each must do, how that is measured, and the hint for each symptom.

Every step is graded on its own: whatever the learner's functions of that step call is taken
from the finished lab, which lies beside this folder. A wrong number is compared with those
that the common mistakes give, and the one that it equals names the hint. What runs in an order
is run with spies, which take notes.
"""

import contextlib
import math
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # the first optimizer would, in every process
import torch.distributed as dist
from torch import nn

from graders.runner import Lesson
from graders.tools import Lab, Wrong, named, near, same

HINTS = {
    "numbers_kind": 'Return a dict with the keys "max", "smallest_normal", '
    '"smallest_subnormal" and "eps", each with a number.',
    "bias": "Everything is off by the same power of two: the bias is 2^(e-1) - 1.",
    "infinity_code": "The largest exponent field is taken by infinity and NaN. The largest "
    "number has the field below it: 2^e - 2.",
    "max_mantissa": "That is a power of two. The largest number has all bits of the mantissa "
    "set: times 2 - 2^-m.",
    "finite_max": "A format without infinity uses the largest exponent field for numbers, "
    "too: 2^e - 1.",
    "nan_code": "The code with all bits set is NaN, also without infinity: M is 2^m - 2 at "
    "most.",
    "normal_exponent": "The field E = 0 is that of zero and the subnormals. The smallest "
    "normal number has E = 1.",
    "subnormal": "A subnormal number is 2^(1-B) M/2^m: it has the exponent of the smallest "
    "normal one, and the smallest has M = 1.",
    "epsilon": "Epsilon is the step from 1.0 to the next number, 2^-m; half of it is the "
    "largest error of rounding there.",
    "spacing_relative": "The spacing is the same from one power of two to the next: take the "
    "power of two in x, not x itself.",
    "spacing_power": "That is the spacing of another power of two: it goes by the largest one "
    "not above |x|. frexp's f is below 1, so its k is one too large.",
    "spacing_subnormal": "Below the smallest normal number the spacing stays what it is there.",
    "spacing_sign": "x may be negative, and log2 wants a positive number: take its size.",
    "bf16_kind": "Return a tensor of x's shape in torch.bfloat16: "
    ".to(torch.int16).view(torch.bfloat16) of the upper halves.",
    "rounding_cast": "The cast is what you are to write: integers only, until the upper halves "
    "are viewed as torch.bfloat16.",
    "rounding_in_place": "x has changed: x.view shares its memory. bits + 1 makes a new "
    "tensor, bits += 1 does not.",
    "truncated": "What lies above the half is rounded down: that is a cut. Add 0x7FFF, and "
    "the odd bit, before you shift.",
    "ties_up": "All ties are rounded away from zero. Add 0x8000 only if the upper half is "
    "odd, and 0x7FFF otherwise.",
    "ties_odd": "Ties go to the wrong neighbour: the bit to look at is the lowest of the "
    "upper half, (bits >> 16) & 1.",
    "nan_lost": "NaN did not stay NaN: its carry may run into the sign. Put 0x7FC0 where "
    "x.isnan().",
    "share_alive": "Compare only gradients that are not zero to begin with: they alone can be "
    "lost, and they are what the share is of.",
    "share_subnormal": "A subnormal number is not lost: it has fewer digits. Count what is 0.",
    "share_late": "Scale before the cast. A gradient that has become zero stays zero.",
    "share_percent": "Return a share between 0 and 1.",
    "scale_own": "The ranks have different scales, and their gradients cannot be added. "
    "all_reduce the largest size with ReduceOp.MAX.",
    "scale_sign": "The largest gradient may be negative: take abs() first.",
    "scale_power": "The scale must be a power of two, or it costs a digit.",
    "scale_up": "With this scale the largest gradient overflows: round the logarithm down.",
    "scale_small": "Twice this scale would still be finite. 2^k <= 65504 / max: frexp gives k "
    "+ 1.",
    "not_divided": "After unscale_ every gradient is what it was, divided by the scale, in "
    "place. A parameter without gradient is no hindrance.",
    "flag_missing": "unscale_ must set self.overflow to True or False.",
    "nan_missed": "Infinity of either sign and NaN all count: what is not isfinite().",
    "one_gradient": "An overflow in one of the gradients was not seen: look at all of them, "
    "and never set the flag back.",
    "flag_own": "Only the rank with the overflow knows of it: the others will step. "
    "all_reduce the flag with ReduceOp.MAX.",
    "not_skipped": "A step with an overflow must be skipped: no optimizer.step().",
    "step_unscales": "step() was called without unscale_ before it, and must unscale itself: "
    "self.overflow is None then.",
    "unscaled_twice": "The gradients were unscaled twice. step() does it only if "
    "self.overflow is None; and update() sets it back to None.",
    "never_steps": "Without overflow step() calls optimizer.step(), once.",
    "backoff": "After an overflow the scale is halved.",
    "count_kept": "Good steps count in a row: an overflow sets them back to 0.",
    "growth": "The scale is doubled by the good step which makes growth_interval of them, no "
    "sooner and no later, and counting begins anew at 0.",
    "verdict_kept": "update() ends the step: self.overflow must be None again.",
    "loss_not_scaled": "backward belongs to scaler.scale(loss), not to the loss.",
    "clip_before": "The gradients were clipped while they were scaled: unscale_ first. The "
    "norm of scaled gradients is always over the limit, and little is left after unscaling.",
    "clip_missing": "The gradients reach the optimizer unclipped: nn.utils.clip_grad_norm_.",
    "own_step": "optimizer.step() was called directly: scaler.step(optimizer) does it, or not.",
    "update_missing": "scaler.update() belongs to the end of every step: without it the scale "
    "never changes.",
    "not_zeroed": "Gradients are left, and the next backward adds to them: zero_grad.",
    "matmul_low": "Products and linear layers are on the list of low precision, whatever "
    "their inputs are.",
    "norm_fp32": "Its input is fp32 here, and LayerNorm is never on the low list.",
    "softmax_kind": "softmax is on the fp32 list of a GPU. On a CPU it is on no list, and "
    "takes what it gets.",
    "no_list": "On no list: the output has the type of the input. A Python number changes "
    "nothing.",
    "widest": "Two types meet, and the wider one wins.",
    "float64": "float64 is left alone.",
    "loss_list": "Losses such as mse_loss are on the fp32 list.",
    "island": "In the island there is no autocast: fp32 times fp32.",
    "no_custom_bwd": "backward runs outside autocast, on a low gradient and fp32 tensors: "
    "both decorators, custom_fwd on forward and custom_bwd on backward.",
    "product_fp32": "Under autocast the product should be low: no cast_inputs here.",
    "product_gradient": "y = x Wᵀ: the gradient of x is g W, that of the weight gᵀ x.",
    "squares_range": "300² is more than fp16 holds: cast_inputs=torch.float32 in custom_fwd.",
    "squares_gradient": "The gradient of the sum of x² is 2 x, times what comes in.",
    "forward_outside": "The model must run inside torch.autocast(kind, low).",
    "low_ignored": "The type that was asked for is not used: pass low on. None means no "
    "autocast at all.",
    "loss_inside": "mean_loss belongs outside the region, where nothing is cast.",
    "loss_low": "The model's output is in 16 bits here: mean_loss(output.float(), rows).",
    "master_fp32": "self.master holds an fp32 copy of each parameter.",
    "master_leaf": "Adam takes leaves only. Detach before you copy: detach().float().clone().",
    "inner_wrong": "self.inner must be an Adam on the copies, with the learning rate that was "
    "given.",
    "gradient_type": "The copies are fp32, and so must their gradients be: .float().",
    "gradient_missing": "The copies do not move: give each its gradient before the inner step.",
    "not_copied_back": "The copies move, and the parameters do not: parameter.copy_(master).",
    "master_overwritten": "The copies lost what bf16 cannot keep. Never read them back from "
    "the parameters: it is the parameters that follow.",
    "gradient_kept": "The fp32 gradient is left after the step, 4 bytes per parameter: set "
    "master.grad to None.",
    "bytes_kind": 'Return a dict with "parameters", "gradients", "master" and "moments".',
    "bytes_16": "Parameters and gradients are in 16 bits in both recipes with bf16.",
    "bytes_master": "Only the recipe with master weights has a copy, in fp32: 4 bytes.",
    "bytes_moments": "Adam has two moments, in the type of what it works on: the copy is fp32.",
    "wire_type": "What is sent must have the type `wire`: cast before the all-reduce.",
    "average_divisor": "A mean is the sum, divided by the ranks once.",
    "divided_late": "The sum overflowed in fp16 before it was divided: divide first.",
    "not_written": "The gradients are unchanged: `to` makes a copy, so copy the mean back.",
    "own_type": "Gradients keep their own type; only what is sent is in 16 bits.",
    "none_gradient": "A parameter may have no gradient: leave it out.",
    "error_ratio": "Divide by the norm of the truth: an error means little without a scale.",
    "error_fp32": "An fp32 mean is not exact: compute the truth in float64, from own.double().",
    "error_own": "The truth is the mean over all ranks: all_reduce, and divide.",
    "sent_twice": "An all-reduce is a reduce-scatter and an all-gather: (N-1)/N of the "
    "buffer, twice.",
    "sent_size": "Bytes, not numbers: wire.itemsize of each.",
    "not_averaged": "The ranks' gradients were not averaged: average_gradients, after "
    "backward.",
    "average_low": "Here the gradients are averaged in fp32: the type is an argument.",
    "unscale_early": "Average first, then unscale: then an overflow is everywhere, and what "
    "is judged is what will be used.",
    "clip_local": "The clipped norm is that of this rank's gradients, and a mean of clipped "
    "gradients is another one. Average first.",
    "loss_own": "Return the mean loss over all ranks, without the scale: all_reduce the loss, "
    "detached, and divide by the ranks.",
    "gradients_gone": "Leave the gradients where they are: the loop zeroes them.",
    "held_fp32": "Autocast changes no parameter: they, their gradients and both moments are "
    "in fp32 in every precision.",
    "held_casts": "A cast is a 16-bit copy of the weight matrices, without biases; in fp32 "
    "there is none.",
    "held_norm": "LayerNorm's input is in fp32 in all cases, and its statistics are two fp32 "
    "numbers for each row.",
    "held_products": "What up takes (1 unit), what GELU takes (4) and what down takes (4) are "
    "in autocast's type, or 4 bytes without it.",
    "other": "The numbers fit no common mistake. Print one tensor before and after, on every "
    "rank, and compare with the text of the step.",
}


LAB = Lab(HINTS, ranks_named=True)


# --- step 1 -------------------------------------------------------------------------------

SHAPES = ((5, 10, False), (8, 7, False), (4, 3, True), (5, 2, False), (3, 4, True))


@LAB.step(
    1, "what a format can hold", "limits and spacing of fp16, bf16 and fp8",
    "format_numbers spacing", worlds=(1,),
    crashes={"math domain|positive input": "spacing_sign"},
)  # fmt: skip
def formats(module, lab, lesson):
    for e, m, finite in SHAPES:
        what = f"of {e} exponent and {m} mantissa bits{', finite' if finite else ''}, "
        found, true = module.format_numbers(e, m, finite), lab.format_numbers(e, m, finite)
        if not isinstance(found, dict) or set(found) != set(true):
            raise Wrong(f"format_numbers({e}, {m}, {finite}) is {found!r}", "numbers_kind")
        ratio = [found[key] / true[key] for key in ("max", "smallest_normal")]
        if ratio[0] == ratio[1] != 1:
            raise Wrong(f"{what}max is {found['max']:g}", "bias")
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
                raise Wrong(f"{what}{key} is {found[key]:g}", named(found[key], hints))
    yield "the limits of five formats are right"
    for x in (1.0, 3.0, -3.0, 0.4, 1000.0, 3 * 2.0**-18):
        found, true = module.spacing(x, 5, 10), lab.spacing(x, 5, 10)
        if found != true:
            power = 2.0 ** (math.frexp(x)[1] - 1)
            known = {
                "spacing_subnormal": power * 2.0**-10 if abs(x) < 2**-14 else math.nan,
                "spacing_power": [2 * true, true / 2],
                "spacing_relative": [x * 2.0**-10, abs(x) * 2.0**-10],
            }
            raise Wrong(f"the spacing of fp16 at {x:g} is {found!r}", named(found, known))


# --- step 2 -------------------------------------------------------------------------------


@contextlib.contextmanager
def without_casts():
    """Raise `Wrong` where a floating-point tensor is cast to bf16."""
    real = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_floating_point() and torch.bfloat16 in (*args, *kwargs.values()):
            refuse(tensor)
        return real(tensor, *args, **kwargs)

    def refuse(*_: Any, **__: Any) -> None:
        raise Wrong("to_bf16 lets torch cast", "rounding_cast")

    names = {"to": to, "bfloat16": refuse, "type": refuse}
    with mock.patch.multiple(torch.Tensor, **names):
        yield


@LAB.step(
    2, "round to bf16, by its bits", "every number as torch's cast, and NaN stays NaN",
    "to_bf16", worlds=(1,),
)  # fmt: skip
def rounding(module, lab, lesson):
    generator = torch.Generator().manual_seed(2)
    upper = torch.randint(0, 0x7F70, (500,), generator=generator, dtype=torch.int64)
    sign = torch.randint(0, 2, (500,), generator=generator, dtype=torch.int64) << 31
    upper = (upper << 16) | sign
    low = torch.randint(1, 0x8000, (500,), generator=generator, dtype=torch.int64)
    cases = {
        "numbers of bf16": upper,
        "numbers below a half": upper | low,
        "numbers above a half": upper | (0x8000 + low),
        "ties": upper | 0x8000,
        "infinity and the largest": torch.tensor([0x7F800000, 0xFF800000, 0x7F7FFFFF]),
        "NaN": torch.tensor([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000]),
    }
    for name, bits in cases.items():
        x = bits.where(bits < 2**31, bits - 2**32).to(torch.int32).view(torch.float32)
        given = x.clone()
        true = x.bfloat16()
        with without_casts():
            found = module.to_bf16(given)
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bfloat16:
            kind = getattr(found, "dtype", type(found).__name__)
            raise Wrong(f"to_bf16 returns {kind}", "bf16_kind")
        if found.shape != true.shape:
            raise Wrong(f"to_bf16 returns the shape {tuple(found.shape)}", "bf16_kind")
        if not torch.equal(given.view(torch.int32), x.view(torch.int32)):
            raise Wrong("to_bf16 has changed its argument", "rounding_in_place")
        if name == "NaN":
            if not found.isnan().all():
                raise Wrong(f"a NaN becomes {found[~found.isnan()][0].item()}", "nan_lost")
            continue
        wrong = found.view(torch.int16) != true.view(torch.int16)
        if wrong.any():
            what = f"{name}: {int(wrong.sum())} of {len(x)} are wrong"
            away = found.float().abs() > x.abs()
            hint = {"numbers above a half": "truncated", "ties": "ties_odd"}.get(name, "other")
            if name == "ties" and away.all():
                hint = "ties_up"
            raise Wrong(what, hint)
        yield f"{name}: right in every bit"


# --- step 3 -------------------------------------------------------------------------------


@LAB.step(
    3, "the gradients that fp16 loses", "the share that is lost, and one scale for all ranks",
    "share_lost loss_scale", worlds=(2, 1),
)  # fmt: skip
def scale(module, lab, lesson):
    # 40 zeros, 30 that are lost, 20 subnormal, 10 normal; times 64 only 15 of them are lost
    sizes = [0.0] * 40 + [2.0**-34] * 15 + [-(2.0**-28)] * 15 + [2.0**-20] * 20 + [0.5] * 10
    g = torch.tensor(sizes)
    for scale, true, known in (
        (1.0, 0.5, {"share_alive": [0.3, 0.7, 70 / 60], "share_subnormal": [50 / 60, 0.9]}),
        (64.0, 0.25, {"share_late": 0.5, "share_alive": [0.15, 0.55]}),
    ):
        found = module.share_lost(g, scale)
        if not near(found, true):
            hints = known | {"share_percent": 100 * true}
            what = f"with scale {scale:g} the share is {found!r}, and {true} is true"
            raise Wrong(what, named(found, hints))
    yield "the share that fp16 loses"
    last = lesson.rank == lesson.world - 1
    g = torch.tensor([1e-9, 5e-3, -0.02] if last else [1e-9, 3e-4, 2e-3])
    found, true = module.loss_scale(g), 2.0**21  # times 0.02 it is 41,943
    if not near(found, true):
        known = {"scale_sign": 2.0**23, "scale_up": 2 * true, "scale_small": true / 2}
        known |= {} if last else {"scale_own": 2.0**24}
        hint = named(found, known)
        if isinstance(found, (int, float)) and found > 0 and math.log2(found) % 1:
            hint = "scale_power"
        raise Wrong(f"the scale is {found!r}, and 2^21 is right", hint)


# --- step 4 -------------------------------------------------------------------------------


class Counted:
    """An optimizer that only counts its steps."""

    def __init__(self, gradients: list):
        parameters = [nn.Parameter(torch.zeros(2)) for _ in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        self.param_groups, self.steps = [{"params": parameters}], 0

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]

    def step(self) -> None:
        self.steps += 1

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None


def make_scaler(module: ModuleType, **settings: Any) -> Any:
    return module.Scaler("cpu", 8.0, **settings)


def probe_unscale(module: ModuleType, lesson: Lesson) -> None:
    scaler, optimizer = (
        make_scaler(module),
        Counted([[8.0, -16.0], None, [0.0, 4.0]]),
    )
    scaler.unscale_(optimizer)
    found, true = torch.stack(optimizer.gradients), torch.tensor([[1.0, -2.0], [0.0, 0.5]])
    if not same(found, true, 1e-5, 1e-9):
        raise Wrong(f"gradients 8, -16, 0, 4 become {found.flatten().tolist()}", "not_divided")
    if scaler.overflow is None or isinstance(scaler.overflow, torch.Tensor):
        raise Wrong(f"self.overflow is {scaler.overflow!r}", "flag_missing")
    if scaler.overflow:
        raise Wrong("self.overflow is True, and all gradients are finite", "other")
    everybody, one = range(lesson.world), [lesson.world - 1]
    for value, where, owners, hint in (
        (-math.inf, 2, everybody, "nan_missed"),
        (math.nan, 2, everybody, "nan_missed"),
        (math.inf, 0, everybody, "one_gradient"),
        (math.inf, 1, everybody, "one_gradient"),
        (math.inf, 1, one, "flag_own"),
    ):
        gradients = [[1.0, 2.0] for _ in range(3)]
        if lesson.rank in owners:
            gradients[where][0] = value
        scaler = make_scaler(module)
        scaler.unscale_(Counted(gradients))
        if not scaler.overflow:
            which = "all ranks" if owners is everybody else f"rank {one[0]}"
            what = f"{value} in gradient {where} of {which}, and overflow is False here"
            raise Wrong(what, hint)


def probe_step(module: ModuleType) -> None:
    for overflow, prepared in ((False, True), (True, True), (True, False), (False, False)):
        scaler, optimizer = make_scaler(module), Counted([[8.0, math.inf if overflow else 1.0]])
        if prepared:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        if not prepared and optimizer.gradients[0][0] == 8.0:
            raise Wrong("step() leaves the gradients scaled", "step_unscales")
        if overflow and optimizer.steps:
            raise Wrong("the optimizer steps after an overflow", "not_skipped")
        if not overflow and optimizer.steps != 1:
            raise Wrong(f"the optimizer steps {optimizer.steps} times", "never_steps")


def probe_update(module: ModuleType) -> None:
    ours, theirs = (make_scaler(m, growth_interval=3) for m in (module, LAB.finished))
    for flag in (0, 0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0):
        before = theirs.value, theirs.good_steps
        ours.value, ours.good_steps = before
        for scaler in (ours, theirs):
            scaler.overflow = bool(flag)
            scaler.update()
        what = "an overflow" if flag else f"good step {before[1] + 1} of 3"
        what = f"after {what} the scale goes from {before[0]:g} to {ours.value:g}"
        what = f"{what}, good_steps to {ours.good_steps}"
        if ours.value != theirs.value:
            raise Wrong(what, "backoff" if flag else "growth")
        if ours.good_steps != theirs.good_steps:
            raise Wrong(what, "count_kept" if flag else "growth")
        if ours.overflow is not None:
            raise Wrong(f"after update() overflow is {ours.overflow}", "verdict_kept")


class SpyScaler:
    """A scaler that takes notes, and the norm of the gradients as they reach step()."""

    def __init__(self, events: list[str], value: float = 64.0):
        self.events, self.value, self.norm, self.inside = events, value, math.nan, False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        self.events.append("scale")
        return loss * self.value

    def unscale_(self, optimizer: Any) -> None:
        self.events.append("unscale_")
        for gradient in LAB.finished.gradients_of(optimizer):
            gradient.div_(self.value)

    def step(self, optimizer: Any) -> None:
        if "unscale_" not in self.events:
            self.unscale_(optimizer)
        self.events.append("step")
        gradients = LAB.finished.gradients_of(optimizer)
        self.norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        self.inside = True
        optimizer.step()
        self.inside = False

    def update(self) -> None:
        self.events.append("update")


class SpyOptimizer(Counted):
    def __init__(self, scaler: SpyScaler, events: list[str], parameters: list):
        self.param_groups, self.steps = [{"params": parameters}], 0
        self.scaler, self.events = scaler, events

    def step(self) -> None:
        self.steps += 1
        if not self.scaler.inside:
            self.events.append("optimizer")


@LAB.step(
    4, "a scaler that finds the scale",
    "scale, unscale, skip on any rank's overflow, fall and grow; clipping in its place",
    "Scaler scaled_step", worlds=(2, 1), crashes={"called twice since": "unscaled_twice"},
)  # fmt: skip
def scaler(module, lab, lesson):
    probe_unscale(module, lesson)
    yield "gradients are unscaled, and every rank knows of every overflow"
    probe_step(module)
    yield "a step is taken or skipped as it should"
    probe_update(module)
    yield "the scale falls and grows as it should"
    events: list[str] = []
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    scaler = SpyScaler(events)
    optimizer = SpyOptimizer(scaler, events, [weight])
    module.scaled_step(scaler, optimizer, weight.square().sum(), 0.5)  # gradient (2, 4)
    judge_events(events, scaler)
    if weight.grad is not None and weight.grad.any():
        raise Wrong("gradients are left after the step", "not_zeroed")
    if not near(scaler.norm, 0.5, 1e-3):
        true = math.sqrt(20)
        known = {"clip_before": [0.5 / 64], "clip_missing": true}
        what = f"the gradients reach the optimizer with norm {scaler.norm:.4f}, limit 0.5"
        raise Wrong(what, named(scaler.norm, known, 1e-3))


def judge_events(events: list[str], scaler: SpyScaler) -> None:
    """Raise `Wrong` for a call of the scaler that is missing."""
    what = f"the calls are {', '.join(events) or 'none'}"
    if "scale" not in events:
        raise Wrong(what, "loss_not_scaled")
    if "optimizer" in events or "step" not in events:
        raise Wrong(what, "own_step")
    if "update" not in events:
        raise Wrong(what, "update_missing")
    if events.index("update") < events.index("step"):
        raise Wrong(what, "other")


# --- step 5 -------------------------------------------------------------------------------

OUTPUTS = {
    "norm": "norm_fp32", "linear": "matmul_low", "scores": "matmul_low", "mixed": "matmul_low",
    "softmax": "softmax_kind", "gelu": "no_list", "scaled": "no_list", "residual": "widest",
    "cat": "widest", "double": "float64", "loss": "loss_list", "island": "island",
}  # fmt: skip


@LAB.step(
    5, "autocast", "types predicted, functions that work under autocast, the loss in fp32",
    "output_dtypes make_product make_squares loss_under_autocast", worlds=(1,),
    crashes={"same dtype|_fwd_used_autocast|_dtype'": "no_custom_bwd"},
)  # fmt: skip
def autocast(module, lab, lesson):
    for kind in ("cpu", "cuda"):
        for low in (torch.bfloat16, torch.float16):
            found, true = module.output_dtypes(kind, low), lab.output_dtypes(kind, low)
            for name, hint in OUTPUTS.items():
                ours = found.get(name) if isinstance(found, dict) else found
                if ours != true[name]:
                    raise Wrong(f"{name} on {kind} is said to be {ours}", hint)
    yield "the dtypes of twelve outputs, on a CPU and on a GPU"

    torch.manual_seed(5)
    x, w, g = torch.randn(3, 4), torch.randn(2, 4), torch.randn(3, 2)
    product = module.make_product("cpu")
    for low in (None, torch.float16):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        region = torch.autocast("cpu", low) if low else contextlib.nullcontext()
        with region:
            y = product.apply(a, b)
        if low and y.dtype != low:
            raise Wrong(f"under autocast the product is {y.dtype}", "product_fp32")
        if not same(y, x @ w.T, 0.03, 1e-9):
            raise Wrong("the product is not that of x and the weight", "other")
        y.backward(g.to(y.dtype))
        for name, ours, true in (("x", a, g @ w), ("weight", b, g.T @ x)):
            if ours.grad is None or not (ours.grad - true).norm() < 0.01 * true.norm():
                raise Wrong(f"the gradient of {name} is wrong", "product_gradient")
    yield "a product of one's own, with its gradients, in autocast and outside"
    squares = module.make_squares("cpu")
    with torch.autocast("cpu", torch.float16):
        x = torch.tensor([300.0, -1.0], dtype=torch.float16, requires_grad=True)
        y = squares.apply(x)
    if y.dtype != torch.float32 or not y.isfinite():
        raise Wrong(
            f"the squares of 300 and -1 sum to {y.item():g}, {y.dtype}", "squares_range"
        )
    (y / 8).backward()
    if not same(x.grad, torch.tensor([75.0, -0.25]), 1e-5, 1e-9):
        raise Wrong(f"the gradient is {x.grad.tolist()}", "squares_gradient")
    yield "a sum of squares in fp32"

    notes: dict[str, Any] = {}

    class Spy(nn.Linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            on = torch.is_autocast_enabled("cpu")
            notes["forward"] = torch.get_autocast_dtype("cpu") if on else None
            return super().forward(rows)

    def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        notes["loss"] = (torch.is_autocast_enabled("cpu"), output.dtype)
        return lab.mean_loss(output, rows)

    module.mean_loss = mean_loss
    model, rows = Spy(lab.WIDTH, lab.WIDTH), lab.make_batches()[0]
    for low in (torch.float16, torch.bfloat16, None):
        loss = module.loss_under_autocast(model, rows, low)
        ran = notes.get("forward")
        if low is not None and ran is None:
            raise Wrong("the model runs without autocast", "forward_outside")
        if ran != low:
            raise Wrong(f"asked for {low}, the model runs in {ran}", "low_ignored")
        inside, dtype = notes.get("loss", (False, torch.float32))
        if inside:
            raise Wrong("mean_loss runs under autocast", "loss_inside")
        if dtype != torch.float32 or loss.dtype != torch.float32:
            raise Wrong(f"mean_loss is computed from {dtype}", "loss_low")
        model.zero_grad()
        loss.backward()


# --- step 6 -------------------------------------------------------------------------------


@LAB.step(
    6, "weights that bf16 cannot keep", "master weights as in fp32, and every byte counted",
    "MasterAdam bytes_per_parameter", worlds=(1,),
    crashes={"non-leaf": "master_leaf", "assign|same dtype|grad_dtype": "gradient_type"},
)  # fmt: skip
def master(module, lab, lesson):
    torch.manual_seed(6)
    start = torch.linspace(0.5, 1.0, 16).bfloat16()
    parameter = nn.Parameter(start.clone())
    optimizer = module.MasterAdam([parameter], lr=1e-3)
    masters, inner = getattr(optimizer, "master", None), getattr(optimizer, "inner", None)
    if not isinstance(masters, list) or [getattr(m, "dtype", None) for m in masters] != [
        torch.float32
    ]:
        kinds = [str(getattr(m, "dtype", m)) for m in masters or []]
        raise Wrong(f"self.master holds {kinds}", "master_fp32")
    if not same(masters[0], start, 1e-5, 1e-9):
        raise Wrong("the copy is not equal to the parameter", "master_fp32")
    worked = [p for group in getattr(inner, "param_groups", []) for p in group["params"]]
    if not any(p is masters[0] for p in worked) or inner.param_groups[0]["lr"] != 1e-3:
        raise Wrong("self.inner is not an Adam on self.master with lr = 0.001", "inner_wrong")
    yield "a copy in fp32, and an Adam on it"
    true = start.float().clone().requires_grad_()
    adam = torch.optim.Adam([true], lr=1e-3)
    for _ in range(20):
        gradient = (torch.rand(16) + 0.5).bfloat16()
        parameter.grad, true.grad = gradient.clone(), gradient.float()
        optimizer.step()
        adam.step()
    left, master = masters[0].grad, optimizer.master[0]
    if not same(master, true.detach(), 1e-5, 1e-9):
        if torch.equal(master.float(), start.float()):
            raise Wrong("after 20 steps the copy is what it was", "gradient_missing")
        rounded = torch.equal(master.float(), master.bfloat16().float())
        hint = "master_overwritten" if rounded else "other"
        raise Wrong("after 20 steps the copy is not that of Adam in fp32", hint)
    if not torch.equal(parameter.detach(), true.detach().bfloat16()):
        raise Wrong("the parameters are not the copy, rounded", "not_copied_back")
    if left is not None:
        raise Wrong(f"master.grad is left, {left.nbytes // 16} bytes each", "gradient_kept")
    yield "20 steps as in fp32, rounded to bf16 at the end"
    for recipe in ("fp32", "bf16", "master"):
        found, true = module.bytes_per_parameter(recipe), lab.bytes_per_parameter(recipe)
        if not isinstance(found, dict) or set(found) != set(true):
            raise Wrong(f"bytes_per_parameter({recipe!r}) is {found!r}", "bytes_kind")
        for kind, hint in (
            ("parameters", "bytes_16"),
            ("gradients", "bytes_16"),
            ("master", "bytes_master"),
            ("moments", "bytes_moments"),
        ):
            if found[kind] != true[kind]:
                raise Wrong(f"{recipe}: {kind} take {found[kind]} bytes", hint)


# --- step 7 -------------------------------------------------------------------------------


@contextlib.contextmanager
def noting_types(types: list[torch.dtype]):
    """Note the type of each tensor that is all-reduced."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        types.append(tensor.dtype)
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield


@LAB.step(
    7, "on the wire", "the mean in every type, its error against float64, the bytes sent",
    "average_gradients reduction_error bytes_sent", worlds=(2, 3),
    crashes={"NoneType": "none_gradient"},
)  # fmt: skip
def reduction(module, lab, lesson):
    n, rank = lesson.world, lesson.rank
    mean = (n + 1) / 2
    for wire in (torch.float32, torch.bfloat16, torch.float16):
        parameters = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        for i in (0, 2):
            parameters[i].grad = torch.full((3,), 2.0 * (rank + 1))
        types: list[torch.dtype] = []
        with noting_types(types):
            module.average_gradients(parameters, wire)
        if set(types) - {wire}:
            raise Wrong(f"asked for {wire}, sent is {types[0]}", "wire_type")
        for i in (0, 2):
            gradient = parameters[i].grad
            found = gradient.float().mean().item()
            if not near(found, 2 * mean, 0.02):
                what = f"sent as {wire}, the mean is {found:.4g} and not {2 * mean:g}"
                known = {"not_written": 2.0 * (rank + 1)}
                known["average_divisor"] = [2 * mean * n, 2 * mean / n]
                raise Wrong(what, named(found, known, 0.02))
            if gradient.dtype != torch.float32:
                raise Wrong(f"sent as {wire}, the gradient is {gradient.dtype}", "own_type")
    parameters[0].grad = torch.full((3,), 60_000.0)
    module.average_gradients(parameters[:1], torch.float16)
    if not parameters[0].grad.isfinite().all():
        raise Wrong("60,000 on every rank has an infinite mean", "divided_late")
    yield "the mean, in the type that was asked for"

    generator = torch.Generator().manual_seed(rank)
    own = torch.randn(1000, generator=generator)
    true = own.double()
    dist.all_reduce(true)
    true /= n
    for what, ours in (("exact in fp32", true.float()), ("off by 1 %", 1.01 * true.float())):
        found = module.reduction_error(ours, own.clone())
        error = ((ours.double() - true).norm() / true.norm()).item()
        if near(found, error, 1e-3):
            continue
        absolute = (ours.double() - true).norm().item()
        against = [own.double(), own.double() / n, true * n]
        mistaken = [((ours.double() - a).norm() / a.norm()).item() for a in against]
        known = {"error_ratio": [absolute, absolute / 1000**0.5], "error_own": mistaken}
        hint = named(found, known, 1e-3)
        if hint == "other" and what.startswith("exact"):
            hint = "error_fp32"
        raise Wrong(f"a mean {what} has the error {found!r}, {error:.3g} is right", hint)
    yield "the error, against float64"
    for wire in (torch.float32, torch.bfloat16):
        found, true = module.bytes_sent(1200, 4, wire), 1800.0 * wire.itemsize
        if not near(found, true):
            what = f"1,200 numbers on 4 ranks as {wire}: {found!r} bytes"
            sizes = [1800.0, 14400.0]
            hint = named(found, {"sent_size": sizes, "sent_twice": found})
            raise Wrong(what, hint)


# --- step 8 -------------------------------------------------------------------------------


@LAB.step(
    8, "three precisions, one loss", "the six moments of a step in order, every byte held",
    "train_step bytes_held", worlds=(2,),
)  # fmt: skip
def training(module, lab, lesson):
    share = lab.BATCH // lesson.world
    rows = lab.make_batches()[0][lesson.rank * share :][:share].clone()
    for low, scaled in ((None, False), (torch.float16, True)):
        events: list[str] = []
        asked: dict[str, Any] = {}
        model = lab.build_model()
        parameters = list(model.parameters())
        scaler = SpyScaler(events)
        optimizer = SpyOptimizer(scaler, events, parameters)
        parameters[-1].register_hook(lambda _, events=events: events.append("backward"))

        def forward(model, rows, low, events=events, asked=asked):
            events.append("forward")
            asked["low"] = low
            return asked.setdefault("loss", lab.loss_under_autocast(model, rows, low))

        def average(parameters, wire, events=events, asked=asked):
            events.append("average")
            asked["wire"] = wire
            lab.average_gradients(parameters, wire)

        real_clip = nn.utils.clip_grad_norm_

        def clip(*args, events=events, real=real_clip, **kwargs):
            events.append("clip")
            return real(*args, **kwargs)

        module.loss_under_autocast, module.average_gradients = forward, average
        with (
            mock.patch.object(nn.utils, "clip_grad_norm_", clip),
            mock.patch.object(module, "clip_grad_norm_", clip, create=True),  # imported by name
        ):
            returned = module.train_step(
                model, optimizer, scaler if scaled else None, rows, low
            )
        what = f"{'with' if scaled else 'without'} a scaler the order is {', '.join(events)}"
        if asked.get("low", 0) != low:
            raise Wrong(f"asked for {low}, the forward gets {asked.get('low')}", "low_ignored")
        if "average" not in events:
            raise Wrong(what, "not_averaged")
        if scaled:
            judge_events(events, scaler)
        place = {name: events.index(name) for name in set(events)}
        if asked["wire"] != torch.float32:
            raise Wrong(f"gradients are averaged in {asked['wire']}", "average_low")
        if place["average"] < place.get("backward", -1):
            raise Wrong(what, "not_averaged")
        if scaled and place.get("unscale_", math.inf) < place["average"]:
            raise Wrong(what, "unscale_early")
        if "clip" not in place:
            raise Wrong(what, "clip_missing")
        if place["clip"] < place["average"]:
            raise Wrong(what, "clip_local")
        if scaled and place["clip"] < place.get("unscale_", math.inf):
            raise Wrong(what, "clip_before")
        if optimizer.steps != 1:
            raise Wrong(f"the optimizer steps {optimizer.steps} times", "never_steps")
        if not any(p.grad is not None and p.grad.any() for p in parameters):
            raise Wrong("no gradient is left after the step", "gradients_gone")
        mean = asked["loss"].detach().double()
        dist.all_reduce(mean)
        mean = mean.item() / lesson.world
        if not near(returned, mean, 1e-5):
            raise Wrong(f"returned is {returned!r}, the mean loss is {mean:.5f}", "loss_own")
        yield "with a scaler, too" if scaled else "the six moments in order, without a scaler"
    for low, size in ((None, 4), (torch.bfloat16, 2), (torch.float16, 2)):
        found, true = module.bytes_held(low, 6), lab.bytes_held(low, 6)
        if not isinstance(found, dict) or set(found) != set(true):
            raise Wrong(f"bytes_held returns {found!r}", "other")
        unit = 6 * lab.WIDTH * lab.LAYERS
        first = 4 * unit + 8 * 6 * lab.LAYERS
        known = {
            "held_norm": [true["activations"] - 8 * 6 * lab.LAYERS]
            + [true["activations"] - part * unit for part in (2, 4)],
            "held_products": found["activations"],
        }
        assert true["activations"] == first + 9 * size * unit
        hints = dict.fromkeys(("parameters", "gradients", "moments"), "held_fp32")
        hints |= {"casts": "held_casts", "activations": named(found["activations"], known)}
        for kind, hint in hints.items():
            if found[kind] != true[kind]:
                what = f"{low or 'fp32'}, 6 rows: {kind} take {found[kind]} bytes"
                raise Wrong(f"{what}, and {true[kind]} are held", hint)
