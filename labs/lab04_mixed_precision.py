# %% [markdown]
# # Lab 04: Mixed precision
#
# A 16-bit number takes half the memory of a 32-bit one and half the time on a wire, and tensor
# cores multiply it many times faster than other units multiply fp32. What it loses is range
# (**fp16**) or digits (**bf16**), and training fails where that is forgotten: gradients become
# zero or infinite, updates vanish, sums drift. In this lab you compute what each format can
# hold, round by hand, find the scale which saves fp16's gradients, write the dynamic loss
# scaler, work with autocast and around it, and keep the weights that bf16 cannot. At the end
# one model trains on all ranks in fp32, bf16 and fp16, to one loss, with every byte predicted.
#
#     torchrun --nproc-per-node=2 labs/lab04_mixed_precision.py
#
# runs the finished lab, on the CPU or on one GPU per process, with 1, 2, 3 or 4 ranks. To do it
# yourself:
#
#     python labs/start.py 04
#     torchrun --nproc-per-node=2 my_labs/lab04_mixed_precision.py
#     python labs/check.py my_labs/lab04_mixed_precision.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, at up to 3 ranks; `--step 2` grades one step, `--output` shows what failing ranks
# printed. Work in a clone of the repository, with its Python: `make test WHAT=labs` sets it up
# once, and `source .venv/bin/activate` puts torchrun on the path.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check which
# prints what it proved. Your copy runs as far as the first blank and says in one line what
# belongs there; the long report below that line is torchrun's. In `check.py` every step stands
# on finished versions of the other steps, so you can take them in any order. Allow three hours.
# Lab 02 comes first: you should know how gradients are averaged. Chapter 05 derives what you
# write here.

# %%
import contextlib
import math
import os
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F


def say(text: str) -> None:
    """Print once, not once per rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence from one rank."""
    blank = issubclass(kind, NotImplementedError)
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 speaks first, and its launcher then ends the others; every rank meets a blank
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start me with: torchrun --nproc-per-node=2 lab04_mixed_precision.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # one rank says it; torchrun then ends the others
        sys.exit("24 rows are cut into equal parts: start 1, 2, 3 or 4 ranks")
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The truth: one process, fp32
#
# Three blocks of LayerNorm and MLP with a residual connection around them: what is left of a
# transformer without its attention. It learns to make rows of 32 numbers symmetric. One process
# trains it in fp32 for 40 steps, with Adam and the gradient clipped to a norm of 1. Its last
# loss is what every precision must arrive at, on every number of ranks.

# %%
WIDTH, LAYERS, BATCH, STEPS = 32, 3, 24, 40
LEARNING_RATE, CLIP = 3e-3, 1.0


class Block(nn.Module):
    """LayerNorm and MLP, with a residual connection around them: [b, h] to [b, h]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Rows [b, 32] to rows [b, 32]."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(device: torch.device | str = "cpu") -> Net:
    """The model, the same wherever it is built."""
    torch.manual_seed(4)
    return Net().to(device)


def build_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def make_batches() -> list[torch.Tensor]:
    """Forty batches of rows [24, 32]."""
    generator = torch.Generator().manual_seed(4)
    return list(torch.randn(STEPS, BATCH, WIDTH, generator=generator))


def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """How far the output is from the rows made symmetric; a mean over all numbers."""
    return (output - (rows + rows.flip(-1)) / 2).square().mean()


def train_alone() -> list[float]:
    """Train in one process, in fp32; return the loss of each step."""
    model, losses = build_model(), []
    optimizer = build_optimizer(model.parameters())
    for rows in make_batches():
        loss = mean_loss(model(rows), rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    TRUE_LOSSES = train_alone()
    first, last = TRUE_LOSSES[0], TRUE_LOSSES[-1]
    say(f"the truth: one process in fp32, loss {first:.4f} to {last:.4f} in {STEPS} steps")

# %% [markdown]
# ## Step 1: what a format can hold
#
# A floating-point number has one bit of sign, $e$ bits of exponent and $m$ bits of mantissa.
# Its value is $2^{E - B} \cdot (1 + M / 2^m)$, where $E$ and $M$ are the fields read as whole
# numbers and the **bias** $B = 2^{e-1} - 1$ puts 1.0 in the middle of the range. All that
# matters follows:
#
# - $E = 0$ is special: there the value is $2^{1-B} \cdot M / 2^m$, without the leading 1. These
#   are the **subnormal** numbers, which fill the gap between zero and the smallest normal
#   number, $2^{1-B}$, in equal steps. The smallest of them has $M = 1$.
# - The largest $E$ is special too: it stands for infinity and NaN. So the largest number has
#   the $E$ below that, and all bits of $M$ set.
# - **Epsilon** is the step from 1.0 to the next number.
# - The **spacing** at any $x$ is the step from its power of two, $2^{-m}$ of it; among the
#   subnormals it stops shrinking.
#
# fp8 E4M3 breaks one of these rules. With so few codes it cannot spare eight for infinity and
# NaN of each sign. It has no infinity, and of the largest $E$ only the code with all bits of
# $M$ set is NaN: the largest number is the one before that. (`finite=True` says so.)


# %%
def format_numbers(exponent: int, mantissa: int, finite: bool = False) -> dict[str, float]:
    """The limits of a format with so many bits, and without infinity if `finite`.

    Returns "max", "smallest_normal", "smallest_subnormal" and "eps".
    """
    # >>> solution 1: return the four numbers, each a power of two or nearly
    # hint: bias is 2**(exponent - 1) - 1; a number is 2.0 ** (E - bias) * (1 + M / 2**mantissa)
    bias = 2 ** (exponent - 1) - 1
    if finite:
        top, fraction = 2**exponent - 1, 2**mantissa - 2
    else:
        top, fraction = 2**exponent - 2, 2**mantissa - 1
    return {
        "max": 2.0 ** (top - bias) * (1 + fraction / 2**mantissa),
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias - mantissa),
        "eps": 2.0**-mantissa,
    }
    # <<< solution


def spacing(x: float, exponent: int, mantissa: int) -> float:
    """The distance from x (not 0) to the next number of the format away from zero."""
    # >>> solution 1: the power of two in x, or the smallest normal one, times 2^-mantissa
    # hint: math.frexp(x) returns (f, k) with |f| in [0.5, 1), x = f * 2^k; it knows no rounding
    power = math.frexp(x)[1] - 1
    smallest = 2 - 2 ** (exponent - 1)
    return 2.0 ** (max(power, smallest) - mantissa)
    # <<< solution


FORMATS = {  # name: (dtype, integers of its width, exponent, mantissa, finite)
    "fp16": (torch.float16, torch.int16, 5, 10, False),
    "bf16": (torch.bfloat16, torch.int16, 8, 7, False),
    "E4M3": (torch.float8_e4m3fn, torch.int8, 4, 3, True),
    "E5M2": (torch.float8_e5m2, torch.int8, 5, 2, False),
}


def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


# %% [markdown]
# The check compares with `torch.finfo`, and takes the smallest subnormal and the spacing from
# the bits themselves: the code 1, and the code after that of $x$.

# %%
if __name__ == "__main__":
    device = start()
    world = dist.get_world_size()

    def check_formats() -> None:
        say("step 1: format  max         smallest normal  smallest subnormal  eps       at 3.0")
        for name, (dtype, integer, e, m, finite) in FORMATS.items():
            found, info = format_numbers(e, m, finite), torch.finfo(dtype)
            one = torch.ones(1, dtype=integer)
            true = {
                "max": info.max,
                "smallest_normal": info.smallest_normal,
                "smallest_subnormal": one.view(dtype).double().item(),
                "eps": info.eps,
            }
            assert found == true, f"{name}: {found}, torch says {true}"
            for x in (1.0, 3.0, 0.375, info.smallest_normal, true["smallest_subnormal"]):
                code = torch.tensor([x]).to(dtype)
                after = (code.view(integer) + 1).view(dtype)
                step = (after.double() - code.double()).item()
                assert spacing(x, e, m) == step, f"{name}: the spacing at {x} is {step}"
            normal, subnormal, eps, here = (
                f"2^{math.log2(number):.0f}"
                for number in (*list(true.values())[1:], spacing(3.0, e, m))
            )
            say(
                f"        {name}    {true['max']:<10.5g}  {normal:15}  {subnormal:18}"
                f"  {eps:8}  {here}"
            )

    check_formats()

# %% [markdown]
# ## Step 2: round to bf16, by its bits
#
# bf16 is the upper half of fp32: the same sign, the same 8 bits of exponent, 7 of the 23 bits
# of mantissa. To cut the lower half off is a cast, and a bad one: every number moves towards
# zero, so errors add up instead of cancelling. The cast of all hardware **rounds to nearest,
# ties to even**:
#
# - The lower half is above 0x8000: one more in the upper half.
# - Below it: the upper half as it is.
# - Exactly 0x8000: a tie. Up if the upper half is odd, so that the result is even. Half of the
#   ties go up, half go down.
#
# One addition does all of it: add 0x7FFF, and 1 more if the lowest bit of the upper half is
# set; then cut. Why does the carry do right when the mantissa is full? It goes into the
# exponent, which is what the next number is, and past the largest finite number that is
# infinity, as it should be. But a NaN may become infinity or zero in this way: put it back.


# %%
def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round a tensor of fp32 to bf16 without a cast of floating-point numbers."""
    # >>> solution 2: add to x.view(torch.int32), keep the upper half, fix what was NaN
    # hint: bits >> 16 is the upper half; .to(torch.int16).view(torch.bfloat16) makes it bf16
    bits = x.view(torch.int32)
    odd = (bits >> 16) & 1
    upper = (bits + 0x7FFF + odd) >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16).view(torch.bfloat16)
    # <<< solution


# %%
if __name__ == "__main__":

    def check_rounding() -> None:
        generator = torch.Generator().manual_seed(rank := dist.get_rank())
        bits = torch.randint(
            -(2**31), 2**31, (200_000,), generator=generator, dtype=torch.int64
        )
        ties = (bits[:50_000] & ~0xFFFF) | 0x8000
        x = torch.cat([bits, ties]).to(torch.int32).view(torch.float32).to(device)
        ours, true = to_bf16(x), x.bfloat16()
        nan = true.isnan()
        assert torch.equal(ours.isnan(), nan), "a NaN is lost, or a number became NaN"
        differ = (ours.view(torch.int16) != true.view(torch.int16)) & ~nan
        example = x[differ][:1].tolist()
        assert not differ.any(), (
            f"{int(differ.sum())} numbers differ from torch's, as {example}"
        )
        if rank == 0:
            say(
                f"step 2: {len(x) - int(nan.sum()):,} numbers, {len(ties):,} of them from ties,"
                " equal to torch's cast in every bit; NaN stays NaN"
            )

    check_rounding()

# %% [markdown]
# ## Step 3: the gradients that fp16 loses
#
# fp16's smallest number is $2^{-24}$, and half of that or less becomes zero. Gradients get
# there: a mean over many outputs divides them, and late in training, or when a model is
# fine-tuned, errors are small. At the other end there is room: fp16 ends at 65,504.
#
# The way out is **loss scaling**. Gradients are linear in the loss: multiply it by $S$ before
# backward, and every gradient comes out multiplied by $S$, before it is ever rounded. (To
# multiply the gradients afterwards is too late.) Divide by $S$ in fp32, before the step. A
# power of two changes the exponent alone, so it costs no digit.
#
# How large may $S$ be? The largest gradient must stay finite: $S$ is the largest power of two
# with $S \cdot \max |g| \le 65504$. Ranks see different rows, and all must use the same $S$ if
# their gradients are to be added up: the largest gradient is that over all ranks.


# %%
def share_lost(gradients: torch.Tensor, scale: float) -> float:
    """The share of the gradients (fp32) that are not zero, and are in fp16 if scaled so."""
    # >>> solution 3: of those that are not zero, how many become zero
    alive = gradients != 0
    lost = alive & ((gradients * scale).half() == 0)
    return (lost.sum() / alive.sum()).item()
    # <<< solution


def loss_scale(gradients: torch.Tensor) -> float:
    """The largest power of two that leaves the largest gradient of all ranks finite in fp16."""
    # >>> solution 3: the largest size on any rank, by all_reduce; then the power of two
    # hint: dist.ReduceOp.MAX; math.frexp(y) returns (f, k) with y = f * 2^k, f in [0.5, 1)
    largest = gradients.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** (math.frexp(65504 / largest.item())[1] - 1)
    # <<< solution


def fine_tuning_gradients(device: torch.device) -> torch.Tensor:
    """All gradients of one backward, in fp32, where the model is almost what it should be."""
    model = build_model(device)
    generator = torch.Generator().manual_seed(dist.get_rank())
    rows = torch.randn(BATCH, WIDTH, generator=generator).to(device)
    with torch.no_grad():
        wanted = model(rows) + 1e-4 * torch.randn(rows.shape, generator=generator).to(device)
    (model(rows) - wanted).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


# %%
if __name__ == "__main__":

    def check_scale() -> None:
        gradients = fine_tuning_gradients(device)
        scale = loss_scale(gradients)
        everywhere: list[float | None] = [None] * world
        dist.all_gather_object(everywhere, scale)
        assert len(set(everywhere)) == 1, f"the ranks choose the scales {everywhere}"
        power = math.log2(scale)
        assert power == int(power), f"{scale} is no power of two"
        lost, left = share_lost(gradients, 1.0), share_lost(gradients, scale)
        infinite = torch.stack(
            [(gradients * s).half().isinf().any() for s in (scale, 4 * scale)]
        )
        flags = infinite.int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        assert flags.tolist() == [0, 1], f"infinite at S, 4 S: {flags.tolist()}"
        assert lost > 0.01 and left == 0, f"lost are {lost:.1%}, with the scale {left:.1%}"
        say(
            f"step 3: {len(gradients):,} gradients; fp16 loses ≈{lost:.1%} of them,"
            f" and with S = 2^{power:.0f} none"
        )

    check_scale()

# %% [markdown]
# ## Step 4: a scaler that finds the scale
#
# The right scale changes while the model learns, and nobody wants to look at every gradient
# first. So try: begin high, and watch for infinities. A step whose gradients hold an infinity
# or a NaN is **skipped**: weights, moments and the optimizer's count of steps stay, and the
# scale is halved. After `growth_interval` good steps in a row it is doubled. That is the idea
# of `torch.amp.GradScaler`.
#
# Four moments of a step, in this order:
#
# - `scale(loss)` multiplies the loss; backward follows.
# - `unscale_(optimizer)` divides all gradients by the scale, and notes in `self.overflow`
#   whether one of them is not finite. Clipping comes after it: a limit on the norm is meant for
#   true gradients, not for those times 65,536.
# - `step(optimizer)` unscales, if you have not, and steps, if nothing overflowed.
# - `update()` halves, or counts and doubles, and forgets the verdict.
#
# In data parallelism the all-reduce carries an infinity to every rank. Where each rank holds
# its own gradients (ZeRO, FSDP, a pipeline's stages), only the owner sees it. It would skip,
# the others would step, and the model is in pieces that do not fit each other, without any
# error. So the verdict is a number (0 or 1), and all ranks take the maximum of it. Every rank
# takes part, also one that has no gradients.


# %%
def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All gradients that an optimizer will use."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Scaler:
    """Scale the loss, unscale gradients, skip what overflowed on any rank, adapt the scale."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        value: float = 2.0**16,
        growth_interval: int = 2000,
    ):
        self.device, self.value, self.growth_interval = device, value, growth_interval
        self.good_steps = 0
        self.overflow: bool | None = None  # None: not unscaled since the last update

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale in place; set self.overflow, alike on all ranks."""
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called twice since the last update()")
        # >>> solution 4: a flag of 0 or 1 from gradients_of(optimizer), its maximum, and divide
        # hint: torch.zeros((), device=self.device) is a flag; dist.all_reduce wants a tensor
        flag = torch.zeros((), device=self.device)
        for gradient in gradients_of(optimizer):
            if not gradient.isfinite().all():
                flag.fill_(1)
            gradient.mul_(1 / self.value)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.overflow = bool(flag.item())
        # <<< solution

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale if that was not done, and step unless a gradient overflowed on some rank."""
        # >>> solution 4: self.overflow says both whether it was done, and what was found
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
        # <<< solution

    def update(self) -> None:
        """Halve the scale after an overflow, double it after growth_interval good steps."""
        # >>> solution 4: set self.value and self.good_steps, and forget self.overflow
        if self.overflow:
            self.value, self.good_steps = self.value / 2, 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
        self.overflow = None
        # <<< solution


def scaled_step(
    scaler: Scaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor, limit: float
) -> None:
    """One step from the loss on: backward, clip this rank's gradients to a norm, and step.

    `scaler` may as well be torch's. Leaves the gradients zeroed.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # >>> solution 4: the calls of the scaler in order, nn.utils.clip_grad_norm_ among them
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # <<< solution


# %% [markdown]
# The check runs torch's scaler and yours side by side, for 24 steps. In five of them a loss is
# so large that its gradients overflow: on all ranks for torch's scaler, on one rank for yours.
# Scales, counts and weights must be the same after every step.

# %%
if __name__ == "__main__":

    def check_scaler() -> None:
        overflows, skipped, path = {3, 4, 11, 12, 18}, [], []
        runs = []
        for make in (
            lambda: Scaler(device, growth_interval=4),
            lambda: torch.amp.GradScaler(device.type, growth_interval=4),
        ):
            weight = nn.Parameter(torch.linspace(-1, 1, 8, device=device))
            runs.append((make(), weight, torch.optim.SGD([weight], lr=0.1)))
        for step in range(24):
            for scaler, weight, optimizer in runs:
                before = weight.detach().clone()
                loss = (weight * torch.arange(8, device=device)).sin().sum()
                here = step % world == dist.get_rank() or scaler is runs[1][0]
                if step in overflows and here:
                    loss = loss * 1e38
                scaled_step(scaler, optimizer, loss, 1.0)
            ours, theirs = runs[0][0], runs[1][0]
            if torch.equal(before, weight):
                skipped.append(step)
            found = (ours.value, ours.good_steps)
            true = (theirs.get_scale(), theirs._get_growth_tracker())
            assert found == true, f"step {step}: scale and good steps {found}, torch's {true}"
            assert torch.equal(runs[0][1], runs[1][1]), f"step {step}: the weights differ"
            path.append(f"{math.log2(ours.value):.0f}")
        assert set(skipped) == overflows
        say(f"step 4: as torch's scaler in 24 steps; skipped {skipped};")
        say(f"        log2 of the scale {' '.join(path)}")

    check_scaler()

# %% [markdown]
# ## Step 5: autocast
#
# `torch.autocast(kind, low)` changes no parameter. It looks at every operator which is called
# inside, and casts that operator's inputs by a list:
#
# - **Low**: matrix products, linear layers, convolutions. Inputs become fp16 or bf16.
# - **fp32**: what needs range or digits, such as most losses. On a GPU also softmax, norms, exp
#   and sums; on a CPU softmax and LayerNorm are on no list.
# - **No list**: the operator takes what it gets (GELU does). Where two types meet (addition,
#   concatenation), the wider one wins.
#
# float64 is left alone: autocast casts from fp32 and 16 bits only. And a region with
# `enabled=False` inside is an island without it: there you cast by hand.
#
# Predict. `block_outputs` below runs twelve operators under autocast, `x` and `w` in fp32. Say
# the dtype of each output before you look; the check will.


# %%
def block_outputs(kind: str, low: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Twelve operators under autocast, by name."""
    x, w = torch.ones(8, 8, device=device), torch.eye(8, device=device)
    seen = {}
    with torch.autocast(kind, low):
        seen["norm"] = F.layer_norm(x, (8,))
        seen["linear"] = F.linear(seen["norm"], w)
        seen["scores"] = seen["linear"] @ seen["linear"].mT
        seen["softmax"] = seen["scores"].softmax(-1)
        seen["mixed"] = seen["softmax"] @ seen["linear"]
        seen["gelu"] = F.gelu(seen["mixed"])
        seen["residual"] = x + seen["gelu"]
        seen["cat"] = torch.cat([seen["gelu"], x])
        seen["scaled"] = seen["gelu"] * 0.5
        seen["double"] = x.double() @ w.double()
        seen["loss"] = F.mse_loss(seen["gelu"], seen["linear"])
        with torch.autocast(kind, enabled=False):
            seen["island"] = seen["gelu"].float() @ w
    return seen


def output_dtypes(kind: str, low: torch.dtype) -> dict[str, torch.dtype]:
    """The dtype of each output of block_outputs on a device of this kind ("cpu", "cuda")."""
    # >>> solution 5: a dict of twelve dtypes: low, torch.float32 or torch.float64
    wide = torch.float32
    return {
        "norm": wide,
        "linear": low,
        "scores": low,
        "softmax": low if kind == "cpu" else wide,
        "mixed": low,
        "gelu": low,
        "residual": wide,
        "cat": wide,
        "scaled": low,
        "double": torch.float64,
        "loss": wide,
        "island": wide,
    }
    # <<< solution


# %% [markdown]
# Autograd remembers the casts, so backward runs through them the right way round. It must run
# *outside* the region, where each operator's backward takes the types which its forward had.
# And the loss? Those on the fp32 list are safe inside. `mean_loss` is made of operators which
# are on no list of the CPU, and its mean of squares would be in 16 bits: compute it outside,
# from the output in fp32.
#
# A function of your own (`autograd.Function`) is not an operator which autocast knows. Its
# forward runs inside the region, where a product comes out low. But what it *saves* are its
# arguments, in fp32, and its backward runs outside: a low gradient meets an fp32 weight, and
# torch says "expected m1 and m2 to have the same dtype". Two decorators fix that, under
# `@staticmethod`:
#
# - `@custom_fwd(device_type=kind)` on forward and `@custom_bwd(device_type=kind)` on backward:
#   backward runs under the autocast state which forward had.
# - `@custom_fwd(device_type=kind, cast_inputs=torch.float32)`: the arguments are cast to fp32,
#   and forward runs *without* autocast. So does backward then, with the same `custom_bwd`. It
#   is for a function which needs the range, like a sum of squares: in fp16, 300² is infinite.


# %%
def make_product(kind: str) -> type[torch.autograd.Function]:
    """A Function, apply(x, weight) = x weightᵀ, which works inside autocast and outside."""
    # >>> solution 5: a class with forward(ctx, x, weight) and backward(ctx, gradient)

    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=kind)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        @custom_bwd(device_type=kind)
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight, gradient.mT @ x

    return Product
    # <<< solution


def make_squares(kind: str) -> type[torch.autograd.Function]:
    """A Function, apply(x) = sum of x², which under autocast computes in fp32."""
    # >>> solution 5: a class with forward(ctx, x) and backward(ctx, gradient)

    class Squares(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=kind, cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        @custom_bwd(device_type=kind)
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * gradient * x

    return Squares
    # <<< solution


def loss_under_autocast(
    model: nn.Module, rows: torch.Tensor, low: torch.dtype | None
) -> torch.Tensor:
    """The mean loss, in fp32, of a forward under autocast to `low` (None: without it)."""
    # >>> solution 5: the model in torch.autocast(rows.device.type, low), mean_loss outside
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type, low)
    with region:
        output = model(rows)
    return mean_loss(output.float(), rows)
    # <<< solution


# %%
if __name__ == "__main__":

    def check_autocast() -> None:
        kind = device.type
        for low in (torch.bfloat16, torch.float16):
            true = {name: y.dtype for name, y in block_outputs(kind, low, device).items()}
            found = output_dtypes(kind, low)
            wrong = [name for name in true if found.get(name) != true[name]]
            assert not wrong, f"{wrong[0]} is {true[wrong[0]]}, not {found.get(wrong[0])}"
        x = torch.randn(6, 8, device=device, requires_grad=True)
        weight = torch.randn(4, 8, device=device, requires_grad=True)
        product, squares = make_product(kind), make_squares(kind)
        with torch.autocast(kind, torch.float16):
            y = product.apply(x, weight)
            total = squares.apply(300 * y / y.detach().abs().max())
        assert y.dtype == torch.float16, f"the product is {y.dtype}"
        assert total.dtype == torch.float32, f"the squares are {total.dtype}"
        assert total.isfinite(), "the sum of squares overflowed"
        sum_of_squares = ((300 * y / y.detach().abs().max()).float() ** 2).sum()
        torch.testing.assert_close(total, sum_of_squares)
        (total / 4096).backward()  # what flows back through the product is in fp16
        with torch.no_grad():
            true = 2 / 4096 * (300 / y.float().abs().max()) ** 2 * y.float().mT @ x
            apart = ((weight.grad - true).norm() / true.norm()).item()
        assert apart < 0.01, f"the gradient is {apart:.1%} from that of fp32"
        model, rows = build_model(device), make_batches()[0].to(device)
        losses = [loss_under_autocast(model, rows, low) for low in (None, torch.bfloat16)]
        assert losses[1].dtype == torch.float32, f"the loss is {losses[1].dtype}"
        losses[1].backward()
        say(
            f"step 5: 12 dtypes as predicted for {kind}; two functions keep their types;"
            f" loss {losses[0].item():.4f}, in bf16 ≈{losses[1].item():.4f}"
        )

    check_autocast()

# %% [markdown]
# ## Step 6: weights that bf16 cannot keep
#
# `model.bfloat16()` halves everything, and needs no scaler: bf16 has fp32's range. But it has 7
# bits of mantissa. Near 1.0 the numbers below it are $2^{-8}$ apart: an update smaller than
# half of that changes nothing. Not a little: nothing, at this step and at all that follow. With
# Adam an update is about the learning rate, whatever the gradient is. With a rate of 0.0003 the
# LayerNorm weights never move from 1.0, and hardly any weight above 0.125 moves. Training
# stalls.
#
# The fix keeps what rounding would take. An fp32 **master copy** of the weights is what the
# optimizer works on; the model's bf16 weights are rounded from it after every step. Small
# updates gather there until they show.
#
# What does it cost? Count bytes per parameter between steps, after backward. Adam keeps two
# moments in the type of what it optimizes. In pure bf16 all is 2 bytes a number. With a master
# copy: bf16 weights, bf16 gradients, and master and both moments in fp32. The fp32 gradient
# which Adam needs exists within the step only: set it to None afterwards, or it costs 4 bytes.
# The sum with the master copy is that of plain fp32 training: the gain is in activations, in
# traffic and in speed.


# %%
class MasterAdam:
    """Adam on an fp32 copy of 16-bit parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = LEARNING_RATE):
        self.parameters = list(parameters)
        # >>> solution 6: self.master, a list of fp32 copies, and self.inner, an Adam on them
        # hint: detach a parameter before you copy it, for Adam takes leaves only
        self.master = [parameter.detach().float().clone() for parameter in self.parameters]
        self.inner = torch.optim.Adam(self.master, lr=lr)
        # <<< solution

    @torch.no_grad()
    def step(self) -> None:
        """Hand the gradients to the copies, step there, round back; keep no fp32 gradient."""
        # >>> solution 6: gradients for the copies, a step of self.inner, and the way back
        for parameter, master in zip(self.parameters, self.master, strict=True):
            master.grad = parameter.grad.float()
        self.inner.step()
        for parameter, master in zip(self.parameters, self.master, strict=True):
            parameter.copy_(master)
            master.grad = None
        # <<< solution

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def tensors(self) -> list[torch.Tensor]:
        """Whatever lives from step to step: copies, their gradients if any, moments."""
        left = [master.grad for master in self.master if master.grad is not None]
        return [*self.master, *left, *moments(self.inner)]


def bytes_per_parameter(recipe: str) -> dict[str, int]:
    """Bytes per parameter of "fp32", "bf16" (all of it) or "master" (bf16 with an fp32 copy).

    Returns "parameters", "gradients", "master" and "moments".
    """
    # >>> solution 6: four numbers for each of the three recipes
    size = 4 if recipe == "fp32" else 2
    return {
        "parameters": size,
        "gradients": size,
        "master": 4 if recipe == "master" else 0,
        "moments": 4 if recipe == "bf16" else 8,
    }
    # <<< solution


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Adam's two moments of every parameter, without its counts of steps."""
    states = optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


# %%
if __name__ == "__main__":

    def check_master() -> None:
        rate, losses = 3e-4, {}
        say("step 6: recipe  parameters  gradients  master  moments    sum  held    last loss")
        for recipe in ("fp32", "bf16", "master"):
            model = build_model(device)
            if recipe != "fp32":
                model.bfloat16()
            parameters = list(model.parameters())
            make = MasterAdam if recipe == "master" else torch.optim.Adam
            optimizer = make(parameters, lr=rate)
            for rows in 5 * make_batches():
                rows = rows.to(device)
                optimizer.zero_grad()
                loss = mean_loss(model(rows.to(parameters[0].dtype)).float(), rows)
                loss.backward()
                optimizer.step()
            losses[recipe] = loss.item()
            own = optimizer.tensors() if recipe == "master" else moments(optimizer)
            held = [*parameters, *(p.grad for p in parameters), *own]
            measured = sum(t.nbytes for t in held) / sum(p.numel() for p in parameters)
            formula = bytes_per_parameter(recipe)
            total = sum(formula.values())
            row = "  ".join(f"{formula[k]:>{len(k)}}" for k in formula)
            say(f"        {recipe:6}  {row}  {total:>5}  {measured:<6.2f}  ≈{loss.item():.4f}")
            assert measured == total, (
                f"{recipe}: {measured:.2f} bytes per parameter, not {total}"
            )
        assert losses["bf16"] > 1.15 * losses["fp32"], "pure bf16 should stall"
        apart = abs(losses["master"] / losses["fp32"] - 1)
        assert apart < 0.03, f"with master weights the loss is {apart:.1%} from fp32's"

    check_master()

# %% [markdown]
# ## Step 7: on the wire
#
# Autocast leaves parameters in fp32, and so gradients, and so their all-reduce: 4 bytes each.
# Cast to 16 bits and you send half. What does it cost in truth?
#
# - Rounding. bf16 rounds by up to $u = 2^{-8}$ of a number, fp16 by $2^{-11}$, $N + 1$ times:
#   in the division, the cast, and $N - 1$ partial sums round the ring. While none is larger
#   than the whole the bound is $(N + 1) u$; since errors cancel, most runs stay far below it.
# - Range. In fp16 the sum of $N$ gradients may overflow where their mean does not. So divide
#   by $N$ *before* you send; for powers of two that costs no digit of a normal number.
#
# The error is measured against the mean computed in float64, as a ratio of norms:
# $\lVert \text{mean} - \text{truth} \rVert / \lVert \text{truth} \rVert$. Bytes sent by a rank:
# $2(N-1)/N$ of the buffer.


# %%
def average_gradients(parameters: Iterable[nn.Parameter], wire: torch.dtype) -> None:
    """Replace each gradient by its mean over the ranks; `wire` is the type that is sent.

    The gradients keep their own type. A parameter without gradient is left alone.
    """
    # >>> solution 7: divide, cast, all-reduce, and copy back
    for parameter in parameters:
        if parameter.grad is not None:
            sent = (parameter.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
    # <<< solution


def reduction_error(mean: torch.Tensor, own: torch.Tensor) -> float:
    """How far `mean` is from the true mean of `own` over the ranks: a ratio of norms."""
    # >>> solution 7: the true mean in float64, by all_reduce of a copy; then both norms
    true = own.double() / dist.get_world_size()
    dist.all_reduce(true)
    return ((mean.double() - true).norm() / true.norm()).item()
    # <<< solution


def bytes_sent(numbers: int, ranks: int, wire: torch.dtype) -> float:
    """Bytes that each rank sends in an all-reduce of so many numbers, round a ring."""
    # >>> solution 7: 2 (N - 1) / N of the buffer
    return 2 * (ranks - 1) / ranks * numbers * wire.itemsize
    # <<< solution


# %%
if __name__ == "__main__":

    def check_reduction() -> None:
        numbers = 240_000
        generator = torch.Generator().manual_seed(dist.get_rank())
        own = torch.randn(numbers, generator=generator).to(device) * 1e-2
        say("step 7: wire  bytes sent by a rank  error      bound")
        for name, wire, u in (
            ("fp32", torch.float32, 2**-24),
            ("bf16", torch.bfloat16, 2**-8),
            ("fp16", torch.float16, 2**-11),
        ):
            parameter = nn.Parameter(torch.zeros(numbers, device=device))
            parameter.grad = own.clone()
            average_gradients([parameter], wire)
            error, sent = reduction_error(parameter.grad, own), bytes_sent(numbers, world, wire)
            assert error <= (world + 1) * u, f"{name}: the error is {error:.1e}"
            assert parameter.grad.dtype == torch.float32
            say(f"        {name}  {sent:>20,.0f}  ≈{error:.1e}   {(world + 1) * u:.1e}")
        parameter.grad = torch.full_like(own, 60_000.0)
        average_gradients([parameter], torch.float16)
        assert parameter.grad.isfinite().all(), "60,000 on every rank overflows in fp16"

    check_reduction()

# %% [markdown]
# ## Step 8: three precisions, one loss
#
# Now a training step for all ranks. Each rank works on its rows. The order matters:
#
# 1. forward under autocast, or without (fp32);
# 2. backward, of the scaled loss if there is a scaler;
# 3. average the gradients, in fp32 here;
# 4. unscale;
# 5. clip;
# 6. step through the scaler, and update it; without one, just step.
#
# Unscale after the all-reduce: then every rank finds the same infinities, and a scaler without
# your all-reduced flag would do.
#
# And what does autocast save? Parameters, gradients and moments are in fp32 as before. What
# shrinks is what autograd keeps for backward, the **saved activations**. For $b$ rows and one
# block, in units of $bh$ numbers:
#
# - the input of LayerNorm, fp32 in all cases, and for each row two fp32 statistics (mean and
#   inverse deviation: $2b$ numbers);
# - the input of `up`, which is one unit, in the type in which it is multiplied;
# - the input of GELU, four units, and that of `down`, four units, both in the type which the
#   products have.
#
# New under autocast are the **casts**: 16-bit copies of the weight matrices, made once per
# forward and kept for backward. (Biases are cast, too, but backward does not need them.)


# %%
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler | None,
    rows: torch.Tensor,
    low: torch.dtype | None,
) -> float:
    """Train on this rank's rows and all others' at once; return the mean loss over all ranks.

    Leaves the gradients as the optimizer saw them: the loop zeroes them.
    """
    # >>> solution 8: the six moments in order, with loss_under_autocast and average_gradients
    loss = loss_under_autocast(model, rows, low)
    (loss if scaler is None else scaler.scale(loss)).backward()
    average_gradients(model.parameters(), torch.float32)
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()
    # <<< solution


def bytes_held(low: torch.dtype | None, rows: int) -> dict[str, int]:
    """Bytes on a rank: "parameters", "gradients", "moments", "casts" and "activations".

    `low` is autocast's type, or None for fp32; `rows` how many rows the rank works on.
    """
    # >>> solution 8: five numbers from PSI, MATRICES, LAYERS, WIDTH and rows
    wide, size = 4, 4 if low is None else low.itemsize
    unit = rows * WIDTH
    block = unit * wide + 2 * rows * wide + unit * size + 4 * unit * size + 4 * unit * size
    return {
        "parameters": wide * PSI,
        "gradients": wide * PSI,
        "moments": 2 * wide * PSI,
        "casts": 0 if low is None else size * MATRICES,
        "activations": LAYERS * block,
    }
    # <<< solution


MATRICES = LAYERS * 8 * WIDTH * WIDTH  # numbers in the weights of up and down
PSI = MATRICES + LAYERS * 7 * WIDTH  # and in biases and LayerNorms


@contextlib.contextmanager
def saved_bytes(model: nn.Module, into: dict[str, int]):
    """Count the storages that autograd saves in this context, parameters apart.

    What has the shape of a weight matrix, either way round, is a cast; rows are fewer than 32.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)}
    kept: dict[int, tuple[str, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kind = "casts" if tuple(tensor.shape) in shapes else "activations"
            kept[storage.data_ptr()] = (kind, storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
    for name in ("casts", "activations"):
        into[name] = sum(size for kind, size in kept.values() if kind == name)


def measured_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, low
) -> dict[str, int]:
    """What is held on this rank, in bytes, as `bytes_held` predicts it."""
    parameters = list(model.parameters())
    found = {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters),
        "moments": sum(t.nbytes for t in moments(optimizer)),
    }
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type, low)
    with saved_bytes(model, found), region:
        output = model(rows)
    del output
    return found


def train(low: torch.dtype | None, device: torch.device) -> tuple[list[float], int, dict]:
    """Train on all batches; return losses, how many steps were skipped, and the bytes held.

    A batch whose step was skipped is taken again, so that all precisions see the same steps.
    """
    model = build_model(device)
    optimizer = build_optimizer(model.parameters())
    # 2^24 is too high for this model: the first steps overflow, and the scaler finds its way
    scaler = Scaler(device, 2.0**24) if low is torch.float16 else None
    losses, skipped, share = [], 0, BATCH // dist.get_world_size()
    for taken, batch in enumerate(make_batches()):
        rows = batch[dist.get_rank() * share :][:share].to(device, copy=True)
        while True:
            optimizer.zero_grad()
            loss = train_step(model, optimizer, scaler, rows, low)
            if optimizer.state[next(model.parameters())].get("step", 0) > taken:
                break
            skipped += 1
            assert skipped < 30, "the optimizer does not step, or the scale does not fall"
        losses.append(loss)
    return losses, skipped, measured_bytes(model, optimizer, rows, low)


# %%
if __name__ == "__main__":

    def check_training() -> None:
        runs = {name: train(low, device) for name, low in PRECISIONS.items()}
        say("step 8: bytes on a rank, formula = measured")
        kinds = "  ".join(bytes_held(None, 1))
        say(f"              {kinds}  skipped  last loss")
        for name, low in PRECISIONS.items():
            losses, skipped, measured = runs[name]
            formula = bytes_held(low, BATCH // world)
            for kind, size in formula.items():
                assert measured[kind] == size, f"{name}, {kind}: {measured[kind]}, not {size}"
            row = "  ".join(f"{formula[k]:>{len(k)},}" for k in formula)
            loss = f" {losses[-1]:.4f}" if low is None else f"≈{losses[-1]:.4f}"
            say(f"        {name}  {row}  {skipped:>7}  {loss}")
            apart = abs(losses[-1] / TRUE_LOSSES[-1] - 1)
            bound = 1e-3 if low is None else 0.05
            assert apart < bound, f"{name}: the last loss is {apart:.1%} from the truth"
        assert runs["fp16"][1] > 0, "2^24 should overflow at first"

    check_training()
    say(f"three precisions, one loss: {TRUE_LOSSES[-1]:.4f} in fp32")
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# - **Kahan summation** does without the fp32 copy: a second bf16 number for each weight holds
#   what rounding has taken so far. Put it in the place of `MasterAdam` and count bytes again.
# - **Stochastic rounding** does without any: round up with a probability that is the part cut
#   off. With your `to_bf16`: add a random number below 2^16 in place of 0x7FFF. Train with it.
# - Clip before you unscale, and look at the losses. Why does Adam hide it, and SGD not?
# - Send bf16 in step 8. At what number of ranks does the last loss show it?
# - Let `torch.amp.GradScaler` take the place of yours in step 8. Then unscale before you
#   average: after which step do the ranks differ?
