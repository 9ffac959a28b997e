# %% [markdown]
# # Lab 04: Mixed precision
#
# A 16-bit number needs half the memory of a 32-bit number, and you can send it in half the
# time. Tensor cores multiply 16-bit numbers many times faster than other units multiply fp32
# numbers. But a 16-bit format has less range (**fp16**) or fewer digits (**bf16**). If you
# forget that, training fails: gradients become zero or infinite, updates are rounded away, and
# sums become inaccurate.
#
# In this lab you compute the limits of each format and round numbers by hand. You find the
# scale that saves the gradients of fp16, and then you write the loss scaler that finds the
# scale during training. You predict what autocast does, and you keep updates that
# bf16 loses. Finally you train one model on all ranks in fp32, bf16 and fp16. All three runs
# must reach the same loss, and you predict every byte that a rank stores.
#
# You can run the finished lab on the CPU, or with one GPU per process. The number of ranks must
# be 1, 2, 3 or 4:
#
#     torchrun --nproc-per-node=2 labs/lab04_mixed_precision.py
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 04                                 # creates my_labs/lab04_...
#     torchrun --nproc-per-node=2 my_labs/lab04_mixed_precision.py
#     python labs/check.py my_labs/lab04_mixed_precision.py   # grades it with up to 3 ranks
#
# With `--step 2`, `check.py` grades only step 2. With `--output`, it also shows what the
# failing ranks printed. You need a clone of the repository and its Python environment. The
# command `make test WHAT=labs` creates the environment, and you need it only once. The command
# `source .venv/bin/activate` makes `torchrun` available in your shell.
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has proved. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. The long report below that line comes from `torchrun`, and you can
# ignore it. The checker grades each step with finished versions of the other steps, so you can
# solve the steps in any order.
#
# Plan three hours for the lab. Solve lab 02 first, because you should know how gradients are
# averaged. Chapter 05 derives the methods of this lab.

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
import torch.distributed.nn  # import it before init: a later import keeps the group alive
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn import functional as F


def say(text: str) -> None:
    """Print a line on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print one sentence from one rank for a blank or a failed check, in place of a traceback.

    Every other error is reported as usual.
    """
    blank = issubclass(kind, NotImplementedError)  # if so, every rank stops at a blank
    if not (blank or issubclass(kind, AssertionError) or kind.__module__ == __name__):
        return sys.__excepthook__(kind, error, trace)
    own = [frame for frame in traceback.extract_tb(trace) if frame.filename == __file__]
    checks = [frame for frame in own if frame.name.startswith(("<module>", "main", "check_"))]
    line = getattr(error, "line", (own if blank else checks)[-1].lineno)
    if os.environ.get("RANK", "0") != "0":
        # rank 0 prints first, and its launcher then ends the other ranks
        time.sleep(60 if blank or os.environ.get("GROUP_RANK", "0") != "0" else 5)
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)


if __name__ == "__main__":
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this lab with: torchrun --nproc-per-node=2 lab04_mixed_precision.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # only rank 0 prints the sentence, and torchrun ends the others
        sys.exit("24 rows are cut into equal parts: start 1, 2, 3 or 4 ranks")
    sys.excepthook = stop_kindly

# %% [markdown]
# Cells that begin with `if __name__ == "__main__":` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.
#
# ## The reference: one process in fp32
#
# The model has three blocks. Each block consists of a LayerNorm and an MLP, with a residual
# connection around them. So the model is a transformer without attention. It learns to make
# rows of 32 numbers symmetric. One process trains it in fp32 for 40 steps, with Adam and with
# gradients that are clipped to a norm of 1. In step 8, every precision must reach the same last
# loss, with every number of ranks.

# %%
WIDTH, LAYERS, BATCH, STEPS = 32, 3, 24, 40
LEARNING_RATE, CLIP = 3e-3, 1.0


class Block(nn.Module):
    """A LayerNorm and an MLP, with a residual connection around them: [b, h] to [b, h]."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """The whole model. It maps rows [b, 32] to rows [b, 32]."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def build_model(device: torch.device | str = "cpu") -> Net:
    """Return the model. Every process gets the same parameters."""
    torch.manual_seed(4)
    return Net().to(device)


def build_optimizer(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=LEARNING_RATE)


def make_batches() -> list[torch.Tensor]:
    """Return forty batches of rows [24, 32]."""
    generator = torch.Generator().manual_seed(4)
    return list(torch.randn(STEPS, BATCH, WIDTH, generator=generator))


def mean_loss(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean squared difference between the output and the symmetric rows."""
    return (output - (rows + rows.flip(-1)) / 2).square().mean()


def train_alone() -> list[float]:
    """Train in one process in fp32. Return the loss of each step."""
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
# **Why.** A floating-point number has one sign bit, $e$ exponent bits and $m$ mantissa bits.
# Its value is $2^{E - B} \cdot (1 + M / 2^m)$. Here $E$ and $M$ are the two fields, read as
# integers. The **bias** $B = 2^{e-1} - 1$ puts 1.0 into the middle of the range. All limits of
# a format follow from this definition:
#
# - $E = 0$ is special. There the value is $2^{1-B} \cdot M / 2^m$, without the leading 1. These
#   are the **subnormal** numbers. They fill the gap between zero and the smallest normal
#   number, $2^{1-B}$, in equal steps. The smallest subnormal number has $M = 1$.
# - The largest $E$ is special, too. It is reserved for infinity and NaN. So the largest number
#   has the next lower $E$, and all bits of $M$ are 1.
# - **Epsilon** is the step from 1.0 to the next number.
# - The **spacing** at $x$ is the step from $x$ to the next number. It is $2^{-m}$ times the
#   largest power of two that is not above $|x|$. Below the smallest normal number, the spacing
#   stays constant.
#
# fp8 E4M3 breaks one of these rules. It has only 256 codes, so it does not reserve the
# largest $E$. It has no infinity, and only the code with all bits of $E$ and $M$ set is NaN.
# The largest number is one code below NaN. The argument `finite=True` describes such a format.
#
# **What to do.** Write `format_numbers` and `spacing`.
#
# **Check.** The lab compares your numbers with `torch.finfo`. It takes the smallest subnormal
# number and the spacing from the bits: from the code 1, and from the code after $x$.


# %%
def format_numbers(exponent: int, mantissa: int, finite: bool = False) -> dict[str, float]:
    """Return the limits of a format with these numbers of bits, without infinity if `finite`.

    The names are "max", "smallest_normal", "smallest_subnormal" and "eps".
    """
    # >>> solution 1: compute the four numbers from the definition, and return them by name
    # hint: Which E and which M does each of the four numbers have?
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
    """Return the distance from x (not 0) to the next number of the format away from zero."""
    # >>> solution 1: find the power of two in x, and return the spacing there
    # hint: math.frexp(x) returns (f, k) with x = f * 2^k and |f| in [0.5, 1), without rounding.
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


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


# %%
if __name__ == "__main__":
    device = init_distributed()
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
            assert found == true, f"{name}: {found}, but torch has {true}"
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
# **Why.** bf16 is the upper half of fp32. It has the same sign, the same 8 exponent bits, and 7
# of the 23 mantissa bits. You could simply cut off the lower half. But then every number moves
# towards zero, so the errors add up and do not cancel. All hardware **rounds to nearest, ties
# to even** instead:
#
# - If the lower half is above 0x8000, the upper half increases by 1.
# - If the lower half is below 0x8000, the upper half does not change.
# - If the lower half is exactly 0x8000, there is a tie. The upper half increases by 1 only if
#   it is odd, so the result is always even. Half of all ties are rounded up.
#
# A single addition does all of this: add 0x7FFF to the bits, and add 1 more if the lowest bit
# of the upper half is set. Then cut off the lower half. If the mantissa is full, the carry
# increases the exponent, and this gives the next larger number. After the largest finite number
# the result is infinity, as it should be. A NaN is the only exception, because a carry could
# turn it into a different value.
#
# **What to do.** Write `to_bf16` with integers only, and make sure that NaN stays NaN.
#
# **Check.** The lab compares your result with torch's cast, for 200,000 random bit patterns and
# 50,000 ties.


# %%
def to_bf16(x: torch.Tensor) -> torch.Tensor:
    """Round an fp32 tensor to bf16 without a cast of floating-point numbers."""
    # >>> solution 2: round the bits x.view(torch.int32), and treat NaN separately
    # hint: bits >> 16 is the upper half. An int16 tensor can be viewed as torch.bfloat16.
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
        assert torch.equal(ours.isnan(), nan), "a NaN did not stay NaN, or a number became NaN"
        differ = (ours.view(torch.int16) != true.view(torch.int16)) & ~nan
        example = x[differ][:1].tolist()
        assert not differ.any(), (
            f"{int(differ.sum())} numbers differ from torch's cast, for example {example}"
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
# **Why.** The smallest number of fp16 is $2^{-24}$. A number that is half as large or smaller
# becomes zero. Many gradients are that small. A mean over many outputs divides them, and
# late in training or in fine-tuning the errors are small. At the upper end fp16 has unused
# range, up to 65,504.
#
# The remedy is **loss scaling**. Gradients are proportional to the loss. If you multiply the
# loss by $S$ before backward, every gradient is multiplied by $S$ before it is rounded. If you
# multiplied the gradients after backward, it would be too late. Before the optimizer step,
# divide the gradients by $S$ in fp32. If $S$ is a power of two, the multiplication changes only
# the exponent, so it loses no digit.
#
# The largest gradient must remain finite. So $S$ should be the largest power of two with
# $S \cdot \max |g| \le 65504$. The ranks have different rows, but they must all use the same
# $S$, because their gradients are added. So take the largest gradient of all ranks.
#
# **What to do.** Write `share_lost` and `loss_scale`.
#
# **Check.** The lab computes the gradients of a model that is already almost right. It looks at
# the fraction that fp16 loses with your scale and without it. With four times your scale, a
# gradient must be infinite.


# %%
def share_lost(gradients: torch.Tensor, scale: float) -> float:
    """Return the fraction of the nonzero fp32 gradients that become zero in fp16."""
    # >>> solution 3: scale and cast the gradients, and return the fraction that is lost
    # hint: Gradients that are zero in fp32 cannot be lost.
    alive = gradients != 0
    lost = alive & ((gradients * scale).half() == 0)
    return (lost.sum() / alive.sum()).item()
    # <<< solution


def loss_scale(gradients: torch.Tensor) -> float:
    """Return the largest power of two with which no gradient of any rank overflows in fp16."""
    # >>> solution 3: find the largest gradient of all ranks, and return the power of two
    # hint: math.frexp(y) returns (f, k) with y = f * 2^k and f in [0.5, 1).
    largest = gradients.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** (math.frexp(65504 / largest.item())[1] - 1)
    # <<< solution


def fine_tuning_gradients(device: torch.device) -> torch.Tensor:
    """Return all fp32 gradients of one backward pass of a model that is almost right."""
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
        assert len(set(everywhere)) == 1, f"the ranks have different scales: {everywhere}"
        power = math.log2(scale)
        assert power == int(power), f"{scale} is not a power of two"
        lost, left = share_lost(gradients, 1.0), share_lost(gradients, scale)
        infinite = torch.stack(
            [(gradients * s).half().isinf().any() for s in (scale, 4 * scale)]
        )
        flags = infinite.int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        assert flags.tolist() == [0, 1], (
            f"infinite with S and with 4 S: {flags.tolist()}, but [0, 1] is right"
        )
        assert lost > 0.01 and left == 0, f"{lost:.1%} are lost, and {left:.1%} with the scale"
        say(
            f"step 3: {len(gradients):,} gradients; fp16 loses ≈{lost:.1%} of them,"
            f" and with S = 2^{power:.0f} none"
        )

    check_scale()

# %% [markdown]
# ## Step 4: a scaler that finds the scale
#
# **Why.** The right scale changes while the model learns, and you cannot look at every gradient
# before you choose it. So a loss scaler tries. It begins with a large scale and looks for
# infinities. If a gradient is infinite or NaN, the step is **skipped**: weights, moments and
# the step count of the optimizer do not change, and the scale is halved. After
# `growth_interval` good steps in a row, the scale is doubled. `torch.amp.GradScaler` works in
# this way.
#
# A step calls the four methods of the scaler in this order:
#
# - `scale(loss)` multiplies the loss. Then backward runs.
# - `unscale_(optimizer)` divides all gradients by the scale. It sets `self.overflow` to True if
#   one of them is not finite. Clipping comes after this call, because the limit of the norm is
#   meant for the true gradients, and not for gradients that are 65,536 times too large.
# - `step(optimizer)` unscales the gradients if you have not done that. Then it steps, unless
#   there was an overflow.
# - `update()` halves the scale, or counts a good step and perhaps doubles the scale. Then it
#   resets `self.overflow`.
#
# In data parallelism, the all-reduce sends an infinity to every rank. With ZeRO, FSDP or
# pipeline stages, each rank has its own gradients, and only one rank sees the infinity. If only
# this rank skipped the step, the parts of the model would no longer belong to the same step,
# and no error would tell you. So the flag is a number, 0 or 1, and all ranks take the maximum
# over all ranks. Every rank must take part, also a rank without gradients.
#
# **What to do.** Write the methods `unscale_`, `step` and `update`, and the function
# `scaled_step`, which calls them in the right order.
#
# **Check.** The lab runs torch's scaler and yours side by side for 24 steps. In five of these
# steps, the loss is so large that its gradients overflow. With torch's scaler they overflow on
# all ranks, and with yours only on one rank. The scales, the counts and the weights must be
# equal after every step.


# %%
def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return all gradients that an optimizer will use."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


class Scaler:
    """Scale the loss, unscale gradients, skip a step after an overflow, adapt the scale."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        value: float = 2.0**16,
        growth_interval: int = 2000,
    ):
        self.device, self.value, self.growth_interval = device, value, growth_interval
        self.good_steps = 0
        self.overflow: bool | None = None  # None: not unscaled yet

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale in place. Set self.overflow, equal on all ranks."""
        if self.overflow is not None:
            raise RuntimeError("unscale_() was called twice since the last update()")
        # >>> solution 4: check all gradients, combine the flags of all ranks, and divide
        # hint: The flag must be a tensor on self.device, because dist.all_reduce needs one.
        flag = torch.zeros((), device=self.device)
        for gradient in gradients_of(optimizer):
            if not gradient.isfinite().all():
                flag.fill_(1)
            gradient.mul_(1 / self.value)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self.overflow = bool(flag.item())
        # <<< solution

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale if necessary, and step unless a gradient overflowed on some rank."""
        # >>> solution 4: use the three possible values of self.overflow
        if self.overflow is None:
            self.unscale_(optimizer)
        if not self.overflow:
            optimizer.step()
        # <<< solution

    def update(self) -> None:
        """Halve the scale after an overflow. Double it after growth_interval good steps."""
        # >>> solution 4: set self.value and self.good_steps, and reset self.overflow
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
    """Run backward, clip the gradients of this rank to a norm, step, and zero the gradients.

    `scaler` may also be torch's scaler.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # >>> solution 4: call the methods of the scaler and nn.utils.clip_grad_norm_ in order
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # <<< solution


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
            assert found == true, (
                f"step {step}: scale and good steps are {found}, but torch has {true}"
            )
            assert torch.equal(runs[0][1], runs[1][1]), (
                f"step {step}: the weights differ from torch's"
            )
            path.append(f"{math.log2(ours.value):.0f}")
        assert set(skipped) == overflows
        say(f"step 4: as torch's scaler in 24 steps; skipped {skipped};")
        say(f"        log2 of the scale {' '.join(path)}")

    check_scaler()

# %% [markdown]
# ## Step 5: autocast
#
# **Why.** `torch.autocast(kind, low)` changes no parameter. It looks at every operator that
# runs inside its region, and it casts the inputs of the operator. Three lists decide the dtype:
#
# - **Low precision**: matrix products, linear layers and convolutions. Their inputs become fp16
#   or bf16.
# - **fp32**: operators that need range or digits, such as most losses. On a GPU, this list also
#   contains softmax, norms, exp and sums. On a CPU, softmax and LayerNorm are on no list.
# - **No list**: all other operators, for example GELU. They use the dtype of their input. If
#   two dtypes meet, as in an addition or a concatenation, the result has the wider dtype.
#
# autocast does not change float64 tensors. A region with `enabled=False` inside a region
# switches autocast off, and there you must cast by hand.
#
# **What to do, part 1.** The function `block_outputs` runs twelve operators under autocast,
# with `x` and `w` in fp32. Write `output_dtypes`, which predicts the dtype of each output.
# Predict before you look.


# %%
def block_outputs(kind: str, low: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the outputs of twelve operators under autocast, by name."""
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
    """Return the dtype of each output of block_outputs, for the kind "cpu" or "cuda"."""
    # >>> solution 5: return a dict of twelve dtypes: low, torch.float32 or torch.float64
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
# Autograd records the casts, so backward also casts the gradients back. Call backward
# *outside* of the region. The backward of each operator then uses the dtypes of its forward.
#
# Losses on the fp32 list are safe inside the region. But `mean_loss` consists of operators that
# are on no list of the CPU, so inside the region its mean of squares would have 16 bits.
# Compute this loss outside, from the output in fp32.
#
# autocast does not look inside a function of your own (`autograd.Function`). Its forward runs
# inside the region, so a product in it has low precision. But it *saves* its arguments, which
# are fp32, and its backward runs outside of the region. There a 16-bit gradient meets an fp32
# weight, and torch raises "expected m1 and m2 to have the same dtype". Two decorators, below
# `@staticmethod`, solve this problem:
#
# - `@custom_fwd(device_type=kind)` on forward and `@custom_bwd(device_type=kind)` on backward.
#   Backward then runs with the autocast state that forward had.
# - `@custom_fwd(device_type=kind, cast_inputs=torch.float32)` on forward. The arguments are
#   then cast to fp32, and forward runs *without* autocast. With the same `custom_bwd`, backward
#   also runs without autocast. Use this for a function that needs range, such as a sum of
#   squares. In fp16, 300² is infinite.
#
# **What to do, part 2.** Write the two functions `Product` and `Squares`, and the function
# `loss_under_autocast`.
#
# **Check.** The lab compares the twelve dtypes, the results of both functions, and the
# gradient of the product with fp32.


# %%
def make_product(kind: str) -> type[torch.autograd.Function]:
    """Return a Function, apply(x, weight) = x weightᵀ, that works with and without autocast."""
    # >>> solution 5: return a class with forward(ctx, x, weight) and backward(ctx, gradient)

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
    """Return a Function, apply(x) = sum of x², that computes in fp32 also under autocast."""
    # >>> solution 5: return a class with forward(ctx, x) and backward(ctx, gradient)

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
    """Return the mean loss in fp32. The model runs under autocast to `low` (None: without)."""
    # >>> solution 5: run the model inside the region, and compute the loss outside
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
        (total / 4096).backward()  # the gradient of the product is fp16
        with torch.no_grad():
            true = 2 / 4096 * (300 / y.float().abs().max()) ** 2 * y.float().mT @ x
            apart = ((weight.grad - true).norm() / true.norm()).item()
        assert apart < 0.01, f"the gradient differs from fp32 by {apart:.1%}"
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
# **Why.** `model.bfloat16()` halves the memory of everything, and it needs no scaler, because
# bf16 has the range of fp32. But bf16 has only 7 mantissa bits. The numbers below 1.0 are
# $2^{-8}$ apart. If an update is smaller than half of that, a weight of 1.0 does not change at
# all, in this step and in all later steps. With Adam, an update is about as large as the
# learning rate, whatever the gradient is. With a learning rate of 0.0003, the LayerNorm weights
# never move away from 1.0, and almost no weight above 0.125 moves. The loss stops falling.
#
# The remedy is an fp32 **master copy** of the weights. The optimizer updates this copy, and the
# bf16 weights of the model are rounded from it after every step. Small updates add up in the
# copy until they change a bf16 weight.
#
# How many bytes per parameter does that need? Count between two steps, after backward. Adam
# stores two moments in the dtype of the tensors that it updates. In pure bf16, every number has
# 2 bytes. With a master copy, the weights and the gradients are bf16, and the copy and both
# moments are fp32. Adam also needs an fp32 gradient, but only during the step. Set it to None
# after the step, because otherwise it needs 4 more bytes. The total with a master copy is the
# same as in plain fp32 training. The advantage is in the activations, in the traffic and in the
# speed.
#
# **What to do.** Write `MasterAdam` and `bytes_per_parameter`.
#
# **Check.** The lab trains with fp32, with pure bf16 and with your master copy. It compares the
# last losses, and it compares your bytes with the size of all tensors.


# %%
class MasterAdam:
    """Adam on fp32 copies of 16-bit parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = LEARNING_RATE):
        self.parameters = list(parameters)
        # >>> solution 6: set self.master to the fp32 copies, and self.inner to an Adam on them
        # hint: Adam accepts only leaf tensors, so detach a parameter before you copy it.
        self.master = [parameter.detach().float().clone() for parameter in self.parameters]
        self.inner = torch.optim.Adam(self.master, lr=lr)
        # <<< solution

    @torch.no_grad()
    def step(self) -> None:
        """Update the copies with the gradients, and round them. Keep no fp32 gradient."""
        # >>> solution 6: give the copies their gradients, step, and round back
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
        """Return all tensors that exist between two steps: copies, their gradients, moments."""
        left = [master.grad for master in self.master if master.grad is not None]
        return [*self.master, *left, *moments(self.inner)]


def bytes_per_parameter(recipe: str) -> dict[str, int]:
    """Return the bytes per parameter of a recipe.

    The recipe is "fp32", "bf16" (everything in bf16) or "master" (bf16 with an fp32 copy). The
    names in the result are "parameters", "gradients", "master" and "moments".
    """
    # >>> solution 6: return the four numbers of the recipe
    size = 4 if recipe == "fp32" else 2
    return {
        "parameters": size,
        "gradients": size,
        "master": 4 if recipe == "master" else 0,
        "moments": 4 if recipe == "bf16" else 8,
    }
    # <<< solution


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the two moments of every parameter, without the step counts."""
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
                f"{recipe}: there are {measured:.2f} bytes per parameter, not {total}"
            )
        assert losses["bf16"] > 1.15 * losses["fp32"], "the loss of pure bf16 should stop"
        apart = abs(losses["master"] / losses["fp32"] - 1)
        assert apart < 0.03, f"with a master copy, the loss differs from fp32 by {apart:.1%}"

    check_master()

# %% [markdown]
# ## Step 7: on the wire
#
# **Why.** Under autocast, the parameters and the gradients are fp32, so the all-reduce sends 4
# bytes per number. If you cast the gradients to 16 bits, it sends half as many bytes. This has
# two costs:
#
# - Rounding. The relative error of one rounding is at most $u = 2^{-8}$ in bf16 and $2^{-11}$
#   in fp16. There are $N + 1$ roundings: one in the division, one in the cast, and $N - 1$ in
#   the partial sums of the ring. If no partial sum is larger than the whole sum, the error is
#   at most about $(N + 1) u$. In most runs it is much smaller, because errors cancel.
# - Range. In fp16, the sum of $N$ gradients may overflow although their mean does not. So
#   divide by $N$ *before* you send. If $N$ is a power of two, the division loses no digit of a
#   normal number.
#
# The lab measures the error relative to the mean in float64, as a ratio of two norms:
# $\lVert \text{mean} - \text{true mean} \rVert / \lVert \text{true mean} \rVert$. In a ring
# all-reduce, a rank sends $2(N-1)/N$ times the bytes of the buffer.
#
# **What to do.** Write `average_gradients`, `reduction_error` and `bytes_sent`.
#
# **Check.** The lab compares the errors of three dtypes with the bound. It also averages
# gradients of 60,000, whose sum would overflow in fp16.


# %%
def average_gradients(parameters: Iterable[nn.Parameter], wire: torch.dtype) -> None:
    """Replace each gradient by its mean over the ranks. `wire` is the dtype that is sent.

    The gradients keep their dtype. A parameter without a gradient does not change.
    """
    # >>> solution 7: average each gradient in the dtype `wire`, and copy the mean back
    for parameter in parameters:
        if parameter.grad is not None:
            sent = (parameter.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
    # <<< solution


def reduction_error(mean: torch.Tensor, own: torch.Tensor) -> float:
    """Return the error of `mean`, relative to the true mean of `own` over the ranks."""
    # >>> solution 7: compute the true mean in float64, and return the ratio of the norms
    true = own.double() / dist.get_world_size()
    dist.all_reduce(true)
    return ((mean.double() - true).norm() / true.norm()).item()
    # <<< solution


def bytes_sent(numbers: int, ranks: int, wire: torch.dtype) -> float:
    """Return the bytes that each rank sends in a ring all-reduce of this many numbers."""
    # >>> solution 7: apply the formula for a ring
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
            assert error <= (world + 1) * u, f"{name}: the error {error:.1e} is above the bound"
            assert parameter.grad.dtype == torch.float32
            say(f"        {name}  {sent:>20,.0f}  ≈{error:.1e}   {(world + 1) * u:.1e}")
        parameter.grad = torch.full_like(own, 60_000.0)
        average_gradients([parameter], torch.float16)
        assert parameter.grad.isfinite().all(), "60,000 on every rank overflows in fp16"

    check_reduction()

# %% [markdown]
# ## Step 8: three precisions, one loss
#
# **Why.** Now you write a training step for all ranks, each with its own rows. The order of the
# operations matters:
#
# 1. Run forward, with or without autocast.
# 2. Run backward from the loss, or from the scaled loss if there is a scaler.
# 3. Average the gradients, here in fp32.
# 4. Unscale the gradients.
# 5. Clip the gradients.
# 6. Step through the scaler and update it. Without a scaler, call only the optimizer.
#
# The gradients are unscaled after the all-reduce. So every rank finds the same infinities, and
# a scaler without your all-reduce of the flag would also work here.
#
# What does autocast save? Parameters, gradients and moments are fp32, as before. The **saved
# activations**, which autograd keeps for backward, become smaller. Let a unit be $bh$ numbers
# for $b$ rows. Each block saves:
#
# - the input of LayerNorm, which is one unit and always fp32. LayerNorm also saves two fp32
#   statistics for each row (mean and inverse deviation), which are $2b$ numbers.
# - the input of `up`, which is one unit. It has the dtype in which the product is computed.
# - the input of GELU (four units) and the input of `down` (four units). Both have the dtype of
#   the products.
#
# With autocast there are also **casts**, which are 16-bit copies of the weight matrices. Each
# forward makes them once and keeps them for backward. The biases are cast, too, but backward
# does not need them.
#
# **What to do.** Write `train_step` and `bytes_held`.
#
# **Check.** The lab trains in three precisions. It compares the last losses with the reference,
# and it compares your bytes with the tensors that exist on a rank.


# %%
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: Scaler | None,
    rows: torch.Tensor,
    low: torch.dtype | None,
) -> float:
    """Make one step together with all other ranks. Return the mean loss over all ranks.

    The gradients stay as the optimizer used them, and the caller sets them to zero.
    """
    # >>> solution 8: write the six parts of a step in order
    # hint: Use loss_under_autocast and average_gradients.
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
    """Return the bytes on a rank that has this many rows.

    The names are "parameters", "gradients", "moments", "casts" and "activations". `low` is the
    dtype of autocast, or None for fp32.
    """
    # >>> solution 8: compute the five numbers from PSI, MATRICES, LAYERS, WIDTH and rows
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


MATRICES = LAYERS * 8 * WIDTH * WIDTH  # elements of the weights of up and down
PSI = MATRICES + LAYERS * 7 * WIDTH  # plus the biases and the LayerNorms


@contextlib.contextmanager
def saved_bytes(model: nn.Module, into: dict[str, int]):
    """Count the bytes that autograd saves in this context, without the parameters.

    A tensor with the shape of a weight matrix, or of its transpose, is a cast. There are fewer
    than 32 rows, so no activation has such a shape.
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
    """Return the measured bytes on this rank, with the names of `bytes_held`."""
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
    """Train on all batches. Return the losses, the number of skipped steps, and the bytes.

    If a step is skipped, its batch is used again. So all precisions make the same 40 steps.
    """
    model = build_model(device)
    optimizer = build_optimizer(model.parameters())
    # 2^24 is too large for this model, so the first steps overflow and the scale falls.
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
            assert skipped < 30, "the optimizer never steps, or the scale does not fall"
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
            assert apart < bound, f"{name}: the last loss is {apart:.1%} from the reference"
        assert runs["fp16"][1] > 0, "with a scale of 2^24, the first steps should overflow"

    check_training()
    say(f"three precisions, one loss: {TRUE_LOSSES[-1]:.4f} in fp32")
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# - **Kahan summation** needs no fp32 copy. For each weight, a second bf16 number stores the
#   rounding error so far. Use it in place of `MasterAdam`, and count the bytes again.
# - **Stochastic rounding** needs neither. The probability of rounding up is the distance from
#   the lower neighbour, divided by the spacing. In your `to_bf16`, add a random number below
#   2^16 in place of 0x7FFF, and train with it.
# - Clip before you unscale, and look at the losses. Why does Adam hide the mistake, and why
#   does SGD not hide it?
# - Send bf16 in step 8. From which number of ranks on does the last loss change?
# - Use `torch.amp.GradScaler` in place of your scaler in step 8, and unscale before you
#   average. After which step do the ranks differ?
