# %% [markdown]
# # Lab 08: Fix out-of-memory errors
#
# A training step needs memory for more than the model. It also needs memory for the gradients,
# the states of the optimizer, the activations that autograd saves for backward, and temporary
# tensors. When the sum exceeds the memory of the device, PyTorch raises an *out of memory*
# error. The error appears at the line that requested memory last, and this line is rarely the
# cause.
#
# In this lab, seven programs run out of memory under a limit of 10 MiB. You measure where the
# bytes are, and you fix one program after the other. Each program needs a different method.
# After every fix, the losses or the gradients must equal those of the program without a limit.
# At the end you read from a profile, and from a snapshot of an allocator, which functions own
# the bytes.
#
# | step | what you write |
# |---|---|
# | 1 | `predict` and `measure_parts` find out how many bytes each part of a step needs. |
# | 2 | `growth` finds a leak, and `logged_step` logs losses without their graphs. |
# | 3 | `evaluate` runs the model without recording anything for backward. |
# | 4 | `update` and `AdamInBackward` lower the peak of the optimizer step. |
# | 5 | `rows_that_fit` and `accumulate` split the batch into micro-batches. |
# | 6 | `Checkpoint` computes the activations of a block a second time. |
# | 7 | `predicted_peak` and `choose` select the blocks that are computed again. |
# | 8 | `account`, `at_peak`, `profile_memory` and `long_lived_first` deal with fragmentation. |
#
# ## How to work on this lab
#
# You need a clone of the repository and its Python environment. The command `make test
# WHAT=labs` creates the environment, and you need it only once. The command `source
# .venv/bin/activate` makes it active in your shell. You can then run the finished lab, on a CPU
# or on a GPU:
#
#     python labs/lab08_memory.py
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 08                         # creates my_labs/lab08_memory.py
#     python my_labs/lab08_memory.py
#     python labs/check.py my_labs/lab08_memory.py    # grades it
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has shown. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. `check.py` grades each step separately, with finished versions of
# the other steps, so you can solve the steps in any order. With `--step 2` it grades only step
# 2.
#
# Plan three hours for the lab. The chapter "Memory and performance" derives what you write
# here.

# %%
import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """At a blank or a failed check, print one sentence instead of a traceback."""
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


def ask(condition: bool, otherwise: str) -> None:
    """Raise an error with this message unless the condition is true."""
    if not condition:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.excepthook = stop_kindly

# %% [markdown]
# Cells that begin with `if __name__ == "__main__":` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.
#
# ## The model
#
# The model has a linear layer for the input, eight residual blocks, and a linear layer for the
# output. Each block normalizes its input and widens it to four times the width. Then it applies
# GELU and dropout, and a second linear layer brings the width back. The lab defines its own
# dropout, so that dropout saves the same number of bytes on every device. It saves a mask,
# which has one byte for each element. The call `model(inputs, run)` uses `run(block, x)` to
# call each block. You need this in step 6.

# %%
WIDTH, HIDDEN, BLOCKS, ROWS = 32, 64, 8, 256
DROPOUT = 0.1
LIMIT = 10 * 2**20  # bytes
KIB, MIB = 2**10, 2**20


class Dropout(nn.Module):
    """Zero each element with probability p while training, and scale up the others."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        mask = torch.rand_like(x) >= self.p
        return (x * mask).div_(1 - self.p)


class Block(nn.Module):
    """A residual block, from [b, h] to [b, h]."""

    def __init__(self, hidden: int, dropout: float = DROPOUT, times: int = 4):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = (
            nn.Linear(hidden, times * hidden),
            nn.Linear(times * hidden, hidden),
        )
        self.dropout = Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Call a block in the usual way."""
    return block(x)


class Net(nn.Module):
    """The model, from [b, width] to [b, width]. `run` calls each block."""

    def __init__(self, width: int, hidden: int, blocks: Iterable[nn.Module]):
        super().__init__()
        self.first, self.last = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, run: Callable = plain) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = run(block, x)
        return self.last(x)


def build_model(device: torch.device | str = "cpu", hidden: int = HIDDEN) -> Net:
    """Return the model. The initial parameters are the same on every device."""
    torch.manual_seed(8)
    return Net(WIDTH, hidden, [Block(hidden) for _ in range(BLOCKS)]).to(device)


def make_adam(model: nn.Module, foreach: bool = False) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error over all elements."""
    return (outputs - targets).square().mean()


def make_batch(
    rows: int = ROWS, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets, both of shape [rows, WIDTH]."""
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs.to(device), torch.sin(3 * inputs).to(device)


# %% [markdown]
# ## How the memory is counted and limited
#
# On a GPU, the allocator reports that the memory is full. PyTorch can lower its limit by
# `torch.cuda.set_per_process_memory_fraction`. But the allocator requests memory in segments of
# at least 2 MiB, which is too coarse for a limit of 10 MiB. So this lab counts the memory
# itself, in the same way on a CPU and on a GPU.
#
# The class `Memory` is a `TorchDispatchMode`, so it sees every operator that runs inside of it.
# It records each storage that an operator returns, until the storage is freed. A tensor and all
# its views share one storage, so a view needs no memory. If the sum would exceed the limit,
# `Memory` raises an error:
#
#     out of memory: wanted 0.25 MiB with 9.81 MiB in use, the limit is 10.00 MiB
#
# `used` is the number of bytes that are in use now, and `peak` is the largest number of bytes
# that were in use at the same time. The method `table()` returns the operators whose results
# are in use now. On a GPU, a memory snapshot shows this. Three things are not counted: single
# numbers such as a loss, the batches, which exist before, and memory that a library allocates
# without an operator of PyTorch.


# %%
class OutOfMemory(RuntimeError):
    """The limit of the memory would be exceeded."""


class Memory(TorchDispatchMode):
    """Count the bytes of the storages on one device. Raise OutOfMemory above the limit."""

    def __init__(self, device: torch.device | str, limit: float = math.inf):
        super().__init__()
        self.device, self.limit = torch.device(device), limit
        self.used = self.peak = 0  # bytes
        self.living: dict[int, tuple[weakref.ref, int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self.storages((args, kwargs))}
        for storage in self.storages(result):
            if storage._cdata not in given:  # a view or a tensor changed in place is not new
                self.add(storage, func.overloadpacket.__name__)
        return result

    def storages(self, tree: object) -> list[torch.UntypedStorage]:
        """Return the storages of all tensors in this structure that are on our device."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return [t.untyped_storage() for t in tensors if t.device.type == self.device.type]

    def add(self, storage: torch.UntypedStorage, maker: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.living or size <= 8:
            return
        if self.used + size > self.limit:
            raise OutOfMemory(
                f"out of memory: wanted {size / MIB:.2f} MiB with {self.used / MIB:.2f} MiB"
                f" in use, the limit is {self.limit / MIB:.2f} MiB"
            )
        self.living[key] = weakref.ref(storage, lambda _: self.remove(key)), size, maker
        self.used += size
        self.peak = max(self.peak, self.used)

    def remove(self, key: int) -> None:
        self.used -= self.living.pop(key)[1]

    def table(self) -> list[tuple[str, int, int]]:
        """Return (operator, number of results, bytes) for what is in use, most bytes first."""
        found: dict[str, list[int]] = {}
        for _, size, maker in self.living.values():
            found.setdefault(maker, []).append(size)
        rows = [(maker, len(sizes), sum(sizes)) for maker, sizes in found.items()]
        return sorted(rows, key=lambda row: -row[2])


def peak_of(run: Callable[[], object], device: torch.device, limit: float = math.inf) -> int:
    """Run a function within a limit, and return the peak of its memory in bytes."""
    with Memory(device, limit) as memory:
        run()
    return memory.peak


if __name__ == "__main__":
    on_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_accelerator else torch.device("cpu")
    torch.set_num_threads(1)  # the tensors are small, so more threads would only wait

    def assert_out_of_memory(run: Callable[[], object]) -> str:
        """Run a program that must exceed the limit, and return its error message."""
        try:
            peak_of(run, device, LIMIT)
        except OutOfMemory as error:
            return str(error)
        raise AssertionError("this program should run out of memory")

    def assert_same(ours, true, what: str) -> None:
        torch.testing.assert_close(
            ours, true, rtol=1e-4, atol=1e-6, msg=f"{what} differ from those without a limit"
        )

# %% [markdown]
# ## Step 1: where the bytes are
#
# If you cannot predict the memory of a step, you can only try different settings. So begin with
# a prediction. In float32, $\Psi$ parameters need $4\Psi$ bytes, their gradients need $4\Psi$
# bytes, and the two moments of Adam need $8\Psi$ bytes. Activations are the tensors that
# autograd saves for backward. Each operator saves only what its derivative needs:
#
# | operator, for $b$ rows | saves | elements | bytes per element |
# |---|---|---|---|
# | `LayerNorm` of $h$ | its input, and the mean and deviation of each row | $bh + 2b$ | 4 |
# | `Linear` from $i$ to $o$ | its input | $bi$ | 4 |
# | GELU of $4h$ | its input | $4bh$ | 4 |
# | dropout of $4h$ | its mask | $4bh$ | 1 |
# | `+` | nothing | | |
# | `(outputs - targets).square()` | its input, which is the difference | $b \cdot$ width | 4 |
#
# If two operators save the same tensor, it exists only once. The input of the first layer is
# the batch, which exists anyway, so do not count it. Also note what is *not* saved: the output
# of GELU is freed as soon as dropout has read it. (A `Linear` also saves its weight, but the
# weight is already counted as a parameter.)
#
# Then measure. `memory.used` changes in four phases: when the model is built, during forward,
# during backward, and during the first step of Adam. Adam allocates its moments in this first
# step.


# %%
class Parts(NamedTuple):
    """The bytes that each part of a training step needs."""

    parameters: int
    gradients: int
    states: int
    activations: int


def predict(width: int, hidden: int, blocks: int, rows: int) -> Parts:
    """Predict the bytes of one step of Net with `blocks` blocks and Adam, in float32."""
    # >>> solution 1: count all parameters, also biases; then add up what the operators save
    psi = width * hidden + hidden + hidden * width + width
    psi += blocks * (2 * hidden + 2 * 4 * hidden * hidden + 4 * hidden + hidden)
    norm, up, gelu, down = hidden + 2, hidden, 4 * hidden, 4 * hidden
    mask = 4 * hidden  # one byte for each element
    saved = blocks * rows * (4 * (norm + up + gelu + down) + mask)
    saved += 4 * rows * (hidden + width)  # saved by the last layer and the loss
    return Parts(4 * psi, 4 * psi, 8 * psi, saved)
    # <<< solution


def measure_parts(
    memory: Memory, build: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> Parts:
    """Measure the same bytes over one step. At the beginning, `memory` is empty."""
    # >>> solution 1: build, make_adam, forward, backward, step; read memory.used in between
    # hint: after backward, the activations are freed, and the gradients are allocated
    model = build()
    adam = make_adam(model)
    parameters = memory.used
    loss = mean_square(model(inputs), targets)
    activations = memory.used - parameters
    loss.backward()
    gradients = memory.used - parameters
    adam.step()
    states = memory.used - parameters - gradients
    return Parts(parameters, gradients, states, activations)
    # <<< solution


# %% [markdown]
# The check compares your prediction with your measurement, and they may differ by 5%.
# `check.py` compares your prediction exactly, because every byte is in the table.

# %%
if __name__ == "__main__":

    def check_parts() -> Parts:
        predicted = predict(WIDTH, HIDDEN, BLOCKS, ROWS)
        batch = make_batch(device=device)
        with Memory(device) as memory:
            measured = measure_parts(memory, lambda: build_model(device), *batch)
        print(f"step 1: {ROWS} rows, MiB   predicted   measured")
        for name, guess, found in zip(Parts._fields, predicted, measured, strict=True):
            print(f"        {name:17}{guess / MIB:11.2f}     ≈{found / MIB:5.2f}")
            ask(
                abs(guess - found) <= 0.05 * found,
                f"{name}: {guess:,} bytes predicted, {found:,} measured",
            )
        return predicted

    PREDICTED = check_parts()

# %% [markdown]
# ## Step 2: what the log keeps
#
# The following program logs the loss of each batch before and after the update, to see whether
# the step has helped. The first batch fits into memory. The program fails in the second batch:


# %%
def leaky_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once, and log the loss of this batch before and after the update."""
    before = mean_square(model(inputs), targets)
    before.backward()
    adam.step()
    adam.zero_grad()
    log.append((before, mean_square(model(inputs), targets)))


# %% [markdown]
# <!-- not of the glossary: node, checkpoint -->
#
# A loss is one number, but it is also the end of a graph. The graph keeps the tensors that were
# saved for backward, as long as anything refers to the loss. `backward()` frees these tensors
# while it goes through the graph. So the loss `before` needs almost no memory at the end of the
# step, because only the nodes of its graph remain. (With `retain_graph=True`, all of it would
# remain.) But no one calls backward on the second loss. Its graph remains complete, and every
# batch adds another graph. The rule is therefore: a value that leaves the step must not have a
# graph. Use `.item()`, which returns a number, or `.detach()`, which returns a tensor. On a
# GPU, `.item()` also waits for the result.
#
# How do you find such a leak in a program that you do not know? You measure how many bytes a
# step leaves behind. The first step leaves memory that is used again later, for example the
# moments of Adam. Every later step should leave nothing. The function `growth` measures this.
# After that, a profile shows what was left. In this lab the profile is `memory.table()`.


# %%
def growth(memory: Memory, step: Callable[[], object], times: int = 3) -> float:
    """Return the bytes that a call of `step` leaves behind, after the first call."""
    # >>> solution 2: call step once; then the mean change of memory.used over `times` calls
    step()
    before = memory.used
    for _ in range(times):
        step()
    return (memory.used - before) / times
    # <<< solution


def logged_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Do the same as leaky_step, but leave only two numbers in memory."""
    # >>> solution 2: write leaky_step so that the logged losses have no graph
    before = mean_square(model(inputs), targets)
    before.backward()
    adam.step()
    adam.zero_grad()
    with torch.no_grad():
        after = mean_square(model(inputs), targets)
    log.append((before.item(), after.item()))
    # <<< solution


# %%
if __name__ == "__main__":

    def check_leak() -> None:
        batches = [make_batch(seed=seed, device=device) for seed in range(4)]

        def train(step: Callable) -> list[tuple[float, float]]:
            model, log = build_model(device), []
            adam = make_adam(model)
            for inputs, targets in batches:
                step(model, adam, inputs, targets, log)
            return [tuple(float(torch.as_tensor(x).detach()) for x in pair) for pair in log]

        print(f"step 2: leaky: {assert_out_of_memory(lambda: train(leaky_step))}")

        def left_by(step: Callable) -> tuple[float, list]:
            with Memory(device) as memory:
                model, log = build_model(device), []
                adam = make_adam(model)
                left = growth(memory, lambda: step(model, adam, *batches[0], log))
                return left, memory.table()

        for name, step in (("leaky", leaky_step), ("fixed", logged_step)):
            left, rows = left_by(step)
            most = ", ".join(f"{maker} {n}" for maker, n, _ in rows[:3] if left)
            print(
                f"        {name}: a step leaves ≈{left / MIB:.2f} MiB"
                + f": {most}" * (left > 0)
            )
            if step is leaky_step:
                ask(
                    abs(left / PREDICTED.activations - 1) < 0.05,
                    f"growth returns {left:,.0f} bytes, but a step leaves its activations",
                )
        ask(left == 0, f"logged_step leaves {left:,.0f} bytes behind")
        logs: list = []
        peak_of(lambda: logs.append(train(logged_step)), device, LIMIT)
        assert_same(torch.tensor(logs[0]), torch.tensor(train(leaky_step)), "the losses")
        print(
            f"        fixed: losses as leaky, from {logs[0][0][0]:.4f} to {logs[0][-1][1]:.4f}"
        )

    check_leak()

# %% [markdown]
# ## Step 3: evaluation
#
# Evaluation needs no gradients, but PyTorch does not know this. As long as any input of an
# operator requires a gradient, every forward pass saves what backward would need.
# `torch.no_grad()` turns the recording off. `torch.inference_mode()` also turns off the
# tracking of versions and views, and you cannot use its results in a later backward pass.
#
# `model.eval()` does neither. It changes how dropout and batch norm behave. So you need both:
# `eval()` and a mode that does not record. Afterwards the model must be in the mode in which it
# was before.
#
# The loss is the mean over all rows. If the last batch is smaller than the others, the mean of
# the means of the batches is a different number.


# %%
def evaluate(model: Net, batches: Iterable) -> tuple[float, torch.Tensor]:
    """Return the mean loss over all rows, and the outputs [rows, width] in the same order.

    The model runs without dropout and without a graph. Its mode is the same afterwards.
    """
    # >>> solution 3: eval mode; no graph; weight losses by rows; join outputs; restore the mode
    training = model.training
    model.eval()
    total, rows, outputs = 0.0, 0, []
    with torch.inference_mode():
        for inputs, targets in batches:
            outputs.append(model(inputs))
            total += mean_square(outputs[-1], targets).item() * len(inputs)
            rows += len(inputs)
        model.train(training)
        return total / rows, torch.cat(outputs)
    # <<< solution


# %%
if __name__ == "__main__":

    def check_evaluation() -> None:
        batches = [make_batch(n, n, device) for n in (512, 512, 512, 64)]

        def naive() -> list[torch.Tensor]:
            model = build_model(device).eval()
            return [model(inputs) for inputs, _ in batches]

        print(f"step 3: with a graph: {assert_out_of_memory(naive)}")
        found = []

        def ours() -> None:
            model = build_model(device)
            found.extend(evaluate(model, batches))
            ask(model.training, "evaluate leaves the model in eval mode")

        peak = peak_of(ours, device, LIMIT)
        loss, outputs = found
        true = []
        model = build_model(device).eval()
        for inputs, _ in batches:
            true.append(model(inputs).detach())
        assert_same(outputs, torch.cat(true), "the outputs")
        true_loss = mean_square(torch.cat(true), torch.cat([y for _, y in batches])).item()
        ask(
            abs(loss - true_loss) < 1e-5,
            f"the loss is {loss:.5f}, and over all rows it is {true_loss:.5f}",
        )
        model_bytes = PREDICTED.parameters / MIB
        print(
            f"        without a graph: {len(outputs):,} rows need ≈{peak / MIB:.2f} MiB; of"
            f" these, the model needs {model_bytes:.2f}; the loss is {loss:.4f}"
        )

    check_evaluation()

# %% [markdown]
# ## Step 4: the peak of a step
#
# A model with $h$ = 104 has $\Psi$ = 704,840 parameters. Parameters, gradients and moments need
# $16\Psi$ bytes, which are 10.8 MiB. The program therefore fails when Adam allocates its
# moments. But the limit applies to the bytes that are in use *at the same time*. Three methods
# lower this peak:
#
# * **Set gradients to None.** After the update, the gradients are not needed. `zero_grad()`
#   sets them to None. With `set_to_none=False` it would keep $4\Psi$ bytes of zeros through the
#   next forward pass, in which the activations are allocated.
# * **Update in place, one parameter at a time.** On a GPU, Adam uses `foreach=True` by default.
#   It updates all parameters with a few kernels, and its temporary tensors are as large as all
#   parameters together. With `foreach=False`, they are as large as one parameter. (`fused=True`
#   is fast and needs no temporary tensors.)
# * **Update during backward.** Backward computes the gradients one after the other. If you use
#   each gradient and drop it at once, you need memory only for the largest gradient, and not
#   for $4\Psi$ bytes. A hook can do this. After
#   `parameter.register_post_accumulate_grad_hook(function)`, autograd calls
#   `function(parameter)` as soon as `parameter.grad` is complete. This method has a
#   disadvantage. The gradients never exist together, so you cannot clip by their total norm,
#   and you cannot accumulate.
#
# The update of Adam in step $t$, with the gradient $g$ and the moments $m$ and $v$, is
#
# $$m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,$$
#
# $$p \leftarrow p - \frac{\eta}{1-\beta_1^t} \frac{m}{\sqrt{v / (1-\beta_2^t)} + \epsilon}$$
#
# Methods whose name ends with `_` write into their tensor, for example `lerp_`, `mul_`,
# `addcmul_` and `addcdiv_`. The denominator needs one temporary tensor of the size of the
# parameter. Nothing else needs a temporary tensor.

# %%
ETA, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: int) -> None:
    """Do step t = 1, 2, … of Adam in place on p, m and v, with one temporary tensor."""
    # >>> solution 4: update m, then v; compute the denominator, the only new tensor; update p
    # hint: x.addcmul_(a, b, value=c) adds c * a * b; x.addcdiv_(a, b, value=c) adds c * a / b
    m.lerp_(g, 1 - BETA1)
    v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
    denominator = v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)
    p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))
    # <<< solution


class AdamInBackward:
    """After its construction, every backward pass of the model also does a step of Adam."""

    def __init__(self, model: nn.Module):
        self.states = {
            p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for p in model.parameters()
        }
        # >>> solution 4: let autograd call self.ready(p) when the gradient of p is complete
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)
        # <<< solution

    @torch.no_grad()
    def ready(self, p: nn.Parameter) -> None:
        """Update this parameter with its gradient, and drop the gradient."""
        state = self.states[p]
        # >>> solution 4: increase t, update, and set the gradient to None
        state["t"] += 1
        update(p, p.grad, state["m"], state["v"], state["t"])
        p.grad = None
        # <<< solution


# %%
if __name__ == "__main__":

    def check_peak() -> None:
        batches = [make_batch(32, seed, device) for seed in range(3)]

        def train(kind: str, memory: Memory | None = None) -> list[float]:
            model, losses = build_model(device, 104), []
            if kind == "in backward":
                keep = AdamInBackward(model)
            else:
                keep = make_adam(model, foreach=kind.startswith("foreach"))
            for inputs, targets in batches:
                loss = mean_square(model(inputs), targets)
                forward[kind] = memory.used if memory else 0
                loss.backward()
                if kind != "in backward":
                    keep.step()
                    keep.zero_grad(set_to_none="zeros" not in kind)
                losses.append(loss.item())
            return losses

        forward: dict[str, int] = {}
        true = train("one by one")
        print(f"step 4: one by one: {assert_out_of_memory(lambda: train('one by one'))}")
        psi = sum(p.numel() for p in build_model(hidden=104).parameters())
        print("        MiB               after forward     peak   bytes per parameter")
        for kind in ("foreach, zeros", "foreach", "one by one", "in backward"):
            with Memory(device, LIMIT if kind == "in backward" else math.inf) as memory:
                losses = train(kind, memory)
            print(
                f"        {kind:18}       ≈{forward[kind] / MIB:5.2f}"
                f"   ≈{memory.peak / MIB:5.2f}                 ≈{memory.peak / psi:4.1f}"
            )
            assert_same(torch.tensor(losses), torch.tensor(true), f"{kind}: the losses")

    check_peak()

# %% [markdown]
# ## Step 5: the batch in pieces
#
# You want to use 1,024 rows in a step, but their activations alone need 22 MiB. Gradients add
# up in `.grad` until someone sets them to None. So you can run forward and backward for a few
# rows at a time, and let the optimizer step once at the end. Such a group of rows is a
# **micro-batch**. At any time, only the activations of one micro-batch are in memory.
#
# How many rows fit? Some memory is needed in any case, and each row needs some more. The sum
# must not exceed the limit.
#
# The loss must stay the same. In this step some rows are padding, as some tokens are if texts
# have different lengths. For these rows, `keep` is False. The loss is the mean over the other
# rows. The mean of the means of the micro-batches would be wrong, because a row would count
# more if its micro-batch has much padding. (Hugging Face's Trainer computed this wrong mean
# until October 2024.) So each micro-batch must contribute the *sum* over its rows, divided by
# the number of kept rows in the *whole* batch. A micro-batch can also consist of padding alone.


# %%
def square_of_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row, [b]."""
    return (outputs - targets).square().mean(1)


def rows_that_fit(limit: int, fixed: int, per_row: int) -> int:
    """Return how many rows fit if they need `fixed` bytes and `per_row` bytes for each row.

    Raises OutOfMemory if not even one row fits.
    """
    # >>> solution 5: divide what is left by per_row, round down, and raise if no row fits
    rows = (limit - fixed) // per_row
    if rows < 1:
        raise OutOfMemory("not one row fits")
    return rows
    # <<< solution


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, rows: int
) -> float:
    """Compute the mean loss over the rows where `keep` is True, and its gradients.

    The model gets at most `rows` rows at a time. Leaves the gradients in .grad, and returns
    the loss.
    """
    # >>> solution 5: for each piece: forward; sum of its kept rows / all kept rows; backward
    # hint: tensor.split(rows) returns pieces of `rows` rows, and the last one may be smaller
    total, counted = 0.0, keep.sum()
    for x, y, k in zip(inputs.split(rows), targets.split(rows), keep.split(rows), strict=True):
        loss = (square_of_rows(model(x), y) * k).sum() / counted
        loss.backward()
        total += loss.item()
    return total
    # <<< solution


# %%
if __name__ == "__main__":

    def check_accumulation() -> None:
        inputs, targets = make_batch(1024, device=device)
        keep = (torch.arange(1024) * torch.arange(1024) // 300 % 4 > 0).to(device)
        fixed = PREDICTED.parameters + PREDICTED.gradients + PREDICTED.states
        # the activations of a row, and temporary tensors of backward
        per_row = PREDICTED.activations // ROWS + 4 * 12 * HIDDEN
        rows = rows_that_fit(LIMIT, fixed, per_row)

        def train(size: int) -> tuple[list[float], list[torch.Tensor]]:
            model = build_model(
                device
            ).eval()  # with dropout, each size would draw different masks
            adam, losses = make_adam(model), []
            for _ in range(
                2
            ):  # in the second step, the moments of Adam exist from the beginning
                adam.zero_grad()
                losses.append(accumulate(model, inputs, targets, keep, size))
                adam.step()
            return losses, [p.grad for p in model.parameters()]

        print(f"step 5: at once: {assert_out_of_memory(lambda: train(1024))}")
        found: list = []
        peak = peak_of(lambda: found.extend(train(rows)), device, LIMIT)
        losses, gradients = train(1024)
        assert_same(torch.tensor(found[0]), torch.tensor(losses), "the losses")
        assert_same(found[1], gradients, "the gradients")
        print(
            f"        {rows} rows fit, so there are {-(-1024 // rows)} micro-batches; peak"
            f" ≈{peak / MIB:.2f} MiB\n        over {int(keep.sum())} rows the loss is"
            f" {found[0][0]:.4f}; loss and gradients equal those of the whole batch"
        )

    check_accumulation()

# %% [markdown]
# ## Step 6: compute it again
#
# Sometimes even one micro-batch is too large, or the model has too many layers. Then you can
# save only the input of each block, and compute the inside of the block a second time when
# backward reaches it. This is **activation checkpointing**. It needs a third more FLOPs. A
# backward pass costs twice as much as a forward pass, so a step costs 4 forward passes instead
# of 3. The saved activations of a block shrink from about $11bh$ to $bh$ numbers. In addition,
# one block is complete in memory, which is the block that backward works on.
#
# Write this as an `autograd.Function`. In `forward`, autograd records nothing, so only what you
# save is saved. Save tensors with `ctx.save_for_backward`, because backward then frees them.
# Save other objects as attributes of `ctx`. In `backward` you receive the gradient of the
# output. Run the block again, and let autograd record this time, with `torch.enable_grad()`.
# The input of this run must be a detached tensor that requires a gradient. Then call
# `output.backward(gradient)`. It adds to the `.grad` of the parameters. At the end, return a
# gradient for every argument of `forward`. The gradient for the block is None.
#
# Dropout needs special care. The second forward pass must draw the same mask as the first one.
# Otherwise the gradients belong to a different function. So save the state of the random
# generator before the first forward pass, and set it before the second one. After that, restore
# the state that the generator had before backward. Otherwise later operators would draw the
# same random numbers a second time.


# %%
def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the random generator of this device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set the state of the random generator of this device."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class Checkpoint(torch.autograd.Function):
    """Checkpoint.apply(block, x) returns block(x), and saves only x for backward."""

    @staticmethod
    def forward(ctx, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 6: save the block, x, and the state of the generator; run the block
        ctx.block, ctx.state = block, random_state(x.device)
        ctx.save_for_backward(x)
        return block(x)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        # >>> solution 6: run the block again with the old state, with grad; backward; return
        # hint: x.detach().requires_grad_() is a leaf that shares the memory of x
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = random_state(x.device)
        set_random_state(ctx.state, x.device)
        with torch.enable_grad():
            output = ctx.block(x)
        set_random_state(now, x.device)
        output.backward(gradient)
        return None, x.grad
        # <<< solution


def checkpoint_by_torch(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Do the same with torch.utils.checkpoint, in its variant that is not reentrant."""
    # >>> solution 6: call checkpoint once
    return checkpoint(block, x, use_reentrant=False)
    # <<< solution


# %%
if __name__ == "__main__":

    def check_checkpoint() -> None:
        inputs, targets = make_batch(512, device=device)

        def steps(run: Callable, found: list) -> None:
            model = build_model(device)
            adam = make_adam(model)
            for _ in range(2):
                loss = mean_square(model(inputs, run), targets)
                loss.backward()
                found.append(loss.item())
                adam.step()
                found.append([p.grad for p in model.parameters()])
                adam.zero_grad()

        print(f"step 6: plain: {assert_out_of_memory(lambda: steps(plain, []))}")
        true: list = []
        before = peak_of(lambda: steps(plain, true), device)
        for name, run in (("by hand", Checkpoint.apply), ("torch's", checkpoint_by_torch)):
            found: list = []
            peak = peak_of(lambda r=run, f=found: steps(r, f), device)
            assert_same(found, true, f"{name}: losses or gradients")
            peak = peak_of(lambda r=run: steps(r, []), device, LIMIT)
            print(
                f"        {name}: peak ≈{peak / MIB:.2f} MiB, plain ≈{before / MIB:.2f} MiB;"
                " with dropout, losses and gradients of two steps equal plain"
            )

    check_checkpoint()

# %% [markdown]
# ## Step 7: what to compute again
#
# It is rarely necessary to checkpoint every block. Some layers save many bytes and are cheap to
# run again. These are layers without a matrix, such as activation functions, normalization and
# dropout. Other layers save few bytes and are expensive to run again. So choose the units whose
# second forward pass costs least, but which save enough memory. The net of this step has both
# kinds, in ten units. You know three numbers of each unit:
#
# | number | what it is |
# |---|---|
# | `saved` | the bytes that the unit saves for backward, with its input |
# | `input` | the bytes of its input, which is all that it saves if it is checkpointed |
# | `flops` | the FLOPs of its forward pass, which is what it costs to run the unit again |
#
# First predict the peak. When backward reaches unit $i$, the later units have been freed
# already. The earlier units still have what they have saved. Unit $i$ needs its complete
# activations, *whether it is checkpointed or not*, because a checkpointed unit has just been
# computed again. The peak is the largest of these sums. It is therefore useless to checkpoint
# the last unit. When backward reaches it, its complete activations are in memory in both cases.
#
# Then choose. Ten units have 1,024 subsets, so you can try all of them. For a large model, this
# is a knapsack problem. With `torch.utils.checkpoint.create_selective_checkpoint_contexts` you
# decide yourself: you write a policy, and it decides for each operator whether its result is
# saved. The partitioner of `torch.compile` solves the problem for you, with the budget
# `torch._functorch.config.activation_memory_budget`.


# %%
class Unit(NamedTuple):
    """The bytes and FLOPs of one unit of a net."""

    saved: int
    input: int
    flops: int


def predicted_peak(units: Sequence[Unit], chosen: Iterable[int]) -> int:
    """Return the peak of the activations in bytes, if these units are checkpointed.

    `chosen` contains the indices of the units.
    """
    # >>> solution 7: the largest sum of what the units before it saved, and its own `saved`
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        peak = max(peak, before + unit.saved)
        before += unit.input if i in chosen else unit.saved
    return peak
    # <<< solution


def choose(units: Sequence[Unit], budget: int) -> set[int] | None:
    """Return the units with the fewest FLOPs whose peak is within `budget`, or None."""
    # >>> solution 7: try all subsets
    # hint: itertools.combinations(range(n), size) returns the subsets of one size
    indices, best = range(len(units)), None
    for size in range(len(units) + 1):
        for chosen in itertools.combinations(indices, size):
            if predicted_peak(units, chosen) <= budget:
                flops = sum(units[i].flops for i in chosen)
                if best is None or flops < best[0]:
                    best = flops, set(chosen)
    return best and best[1]
    # <<< solution


# %%
class Wave(nn.Module):
    """A residual block without a matrix, from [b, h] to [b, h]."""

    def __init__(self, hidden: int, dropout: float = DROPOUT):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(hidden), Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(torch.sin(3 * self.norm(x))))


def build_mixed(device: torch.device | str = "cpu") -> Net:
    """Return a net with five blocks of both kinds, in turn."""
    torch.manual_seed(8)
    blocks: list[nn.Module] = []
    for times in (4, 1, 3, 2, 4):
        blocks += [Block(HIDDEN, times=times), Wave(HIDDEN)]
    return Net(WIDTH, HIDDEN, blocks).to(device)


def measure_unit(block: nn.Module, rows: int, device: torch.device) -> Unit:
    """Measure what a block saves for backward, and count its FLOPs."""
    with Memory(device) as memory:
        x = torch.randn(rows, HIDDEN, device=device)
        size = memory.used
        y = block(x.requires_grad_())
        saved = memory.used - y.nbytes
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    return Unit(saved, size, 2 * rows * matrices + 20 * x.numel())


if __name__ == "__main__":

    def check_choice() -> None:
        rows = 640
        inputs, targets = make_batch(rows, device=device)
        model = build_mixed(device)
        units = [measure_unit(block, rows, device) for block in model.blocks]
        psi = sum(p.numel() for p in model.parameters())
        # parameters and moments, the last layer and the loss, temporary tensors of backward
        fixed = 12 * psi + 4 * rows * (HIDDEN + WIDTH) + 4 * rows * 5 * HIDDEN
        everything, forward = range(len(units)), sum(unit.flops for unit in units)

        def train(chosen: Iterable[int], found: list) -> None:
            model = build_mixed(device)
            adam, again = make_adam(model), {model.blocks[i] for i in chosen}

            def run(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
                return Checkpoint.apply(block, x) if block in again else block(x)

            for _ in range(2):
                loss = mean_square(model(inputs, run), targets)
                loss.backward()
                adam.step()
                adam.zero_grad()
                found.append(loss.item())

        chosen = choose(units, LIMIT - fixed)
        true: list = []
        train((), true)
        print(f"step 7: plain: {assert_out_of_memory(lambda: train((), []))}")
        print("        checkpointed          predicted   measured MiB   FLOPs of the step")
        for name, which in (
            ("none", ()),
            ("the last", (9,)),
            ("all", everything),
            (", ".join(map(str, sorted(chosen))), chosen),
        ):
            found: list = []
            limit = LIMIT if which is chosen else math.inf
            peak = peak_of(lambda w=which, f=found: train(w, f), device, limit)
            guess = fixed + predicted_peak(units, which)
            more = 100 * sum(units[i].flops for i in which) / (3 * forward)
            numbers = f"{guess / MIB:11.2f}     ≈{peak / MIB:5.2f}"
            print(f"        {name:20}{numbers}          +{more:.1f}%")
            ask(abs(guess - peak) < 0.1 * peak, "the prediction differs by more than 10%")
            assert_same(torch.tensor(found), torch.tensor(true), f"{name}: the losses")

    check_choice()

# %% [markdown]
# ## Step 8: enough, but in pieces
#
# The last program fails although enough memory is free:
#
#     out of memory: wanted 4.00 MiB; 8.83 MiB are free, the largest piece has 1.80 MiB
#
# A tensor needs one contiguous piece of addresses. PyTorch does not request memory from the
# driver for each tensor, because this would take longer than most kernels. It keeps the memory
# that it has received, and it gives pieces of it to the tensors. This is a **caching
# allocator**. The next cell contains its central algorithm for one piece of memory: best fit,
# split and coalesce. (In [Assignment
# 1](../assessment/assignments.md#1-memory-a-caching-allocator) you write an allocator for
# several streams.) If tensors that stay lie between tensors that are freed, the free pieces
# cannot be joined. This is **fragmentation**.
#
# An allocator shows its state in a **snapshot**. On a GPU, `torch.cuda.memory._snapshot()`
# returns it. In this lab, `allocator.snapshot()` returns one of the same form. Two parts of it
# answer two questions.
#
# **How much memory is used, and in which pieces?** `segments` is a list of what came from the
# driver, and each segment has a list of `blocks`. A block has a `size`. It also has a
# `requested_size`, which is the size before it was rounded up to a multiple of 512 bytes. Its
# `state` is one of three. In the state `active_allocated`, a tensor uses the block. In the
# state `active_pending_free`, Python has freed the block, but another stream may still use it.
# In the state `inactive`, the block is free. (The docstring of `_snapshot` calls the second
# state `active_awaiting_free`. The snapshots themselves contain `active_pending_free`.) A free
# block still has the `requested_size` of its last tensor. You compute four numbers from this:
#
# * *requested* is the number of bytes that tensors requested, in both kinds of active blocks.
# * *allocated* is the size of the blocks in the state `active_allocated`. It equals
#   `torch.cuda.memory_allocated()`.
# * *reserved* is the `total_size` of all segments. It equals `torch.cuda.memory_reserved()`.
# * *largest* is the size of the largest free block. If it is much smaller than the free memory,
#   the memory is fragmented.
#
# **Which functions own the bytes?** `device_traces` has a list for each device, with everything
# that happened after `torch.cuda.memory._record_memory_history()`. An entry has an `action`, an
# `addr`, a `size`, and `frames` with the innermost frame first. The function `maker(entry)`
# returns the frame that allocated the memory, which we call the maker of the block. A block is
# in use from its entry `alloc` on. When Python drops the tensor, there is an entry
# `free_requested`. After the entry `free_completed`, the allocator can use the block again, so
# count the block until then. The other actions (`segment_alloc`, `oom`, `snapshot`) are not
# about tensors, and they may have no `addr`. A block that was allocated before the recording
# has an entry for its end, but none for its beginning. If you replay the history up to its
# peak, you know which makers own the bytes, and which allocation reached the peak.
#
# A CPU has no such snapshot, but the profiler sees its allocator. With `profile_memory=True` it
# records the address and the bytes of each allocation and each free. `as_history` converts them
# to entries, whose frames are the operators around them. So you can use `at_peak` for both. The
# profiler also sees temporary tensors inside of an operator, which `Memory` cannot see. Here
# these are the temporary tensors of dropout, because the CPU converts its mask to float32
# before it multiplies.
#
# The last failure has a simple fix, which is the order. If the tensors that are never freed are
# allocated first, they lie next to each other. If you cannot change the order, PyTorch has
# three settings. With `expandable_segments:True`, a segment can grow, because more pages are
# mapped behind it. `max_split_size_mb` forbids to split large blocks, and
# `roundup_power2_divisions` makes sizes more alike.


# %%
@dataclass
class Piece:
    """A piece of memory with `size` bytes from `start` on. A tensor requested `requested`."""

    start: int
    size: int
    used: bool = False
    requested: int = 0


class Allocator:
    """An allocator. `pieces` is all of its memory, used or free, in the order of addresses."""

    def __init__(self, capacity: int):
        self.pieces, self.history = [Piece(0, capacity)], []

    def malloc(self, requested: int, name: str) -> int:
        """Allocate at least `requested` bytes, and return their address."""
        size = -(-requested // 512) * 512
        fitting = [p for p in self.pieces if not p.used and p.size >= size]
        if not fitting:
            raise self.out_of_memory(size)
        piece = min(fitting, key=lambda p: p.size)  # best fit
        if piece.size > size:  # split
            rest = Piece(piece.start + size, piece.size - size)
            self.pieces.insert(self.pieces.index(piece) + 1, rest)
        piece.size, piece.used, piece.requested = size, True, requested
        self.note("alloc", piece, name)
        return piece.start

    def free(self, start: int) -> None:
        """Free the piece that starts at this address."""
        i = next(i for i, p in enumerate(self.pieces) if p.start == start)
        self.note("free_requested", self.pieces[i])
        self.note("free_completed", self.pieces[i])  # no other stream uses it
        self.pieces[i].used = False
        for left in (i, i - 1):  # coalesce with the right neighbor, then with the left one
            pair = self.pieces[left : left + 2] if left >= 0 else []
            if len(pair) == 2 and not pair[0].used and not pair[1].used:
                pair[0].size += pair[1].size
                del self.pieces[left + 1]

    def note(self, action: str, piece: Piece, *names: str) -> None:
        """Add an entry to the history."""
        entry = {"action": action, "addr": piece.start, "size": piece.requested, "stream": 0}
        self.history.append(entry | {"frames": frames_of(names)})

    def snapshot(self) -> dict:
        """Return a snapshot like torch.cuda.memory._snapshot(), with one segment."""
        blocks = [
            {
                "address": p.start,
                "size": p.size,
                "requested_size": p.requested,
                "state": "active_allocated" if p.used else "inactive",
                "frames": [],
            }
            for p in self.pieces
        ]
        used = sum(p.size for p in self.pieces if p.used)
        segment = {"address": 0, "device": 0, "stream": 0, "segment_type": "large"}
        segment |= {"total_size": sum(p.size for p in self.pieces), "blocks": blocks}
        segment |= {"allocated_size": used, "active_size": used}
        return {"segments": [segment], "device_traces": [self.history]}

    def out_of_memory(self, size: int) -> OutOfMemory:
        free = [p.size for p in self.pieces if not p.used]
        return OutOfMemory(
            f"out of memory: wanted {size / MIB:.2f} MiB; {sum(free) / MIB:.2f} MiB are free,"
            f" the largest piece has {max(free, default=0) / MIB:.2f} MiB"
        )


def frames_of(names: Iterable[str]) -> list[dict]:
    """Return the frames of a stack that has only names, the innermost first."""
    return [{"filename": "", "line": 0, "name": name} for name in names]


def maker(entry: dict) -> str:
    """Return the innermost frame that is not one of the allocation functions of PyTorch."""
    names = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}".removeprefix(":0 ")
        for frame in entry["frames"]
    ]
    telling = (n for n in names if not n.startswith(("aten::empty", "aten::resize_")))
    return next(telling, names[-1] if names else "unknown")


class Account(NamedTuple):
    """Four numbers of a snapshot, in bytes."""

    requested: int
    allocated: int
    reserved: int
    largest: int


def account(segments: Iterable[dict]) -> Account:
    """Return the four numbers for the segments of a snapshot."""
    # >>> solution 8: add up the blocks of all segments, according to their states
    blocks = [block for segment in segments for block in segment["blocks"]]
    return Account(
        requested=sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        allocated=sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        reserved=sum(segment["total_size"] for segment in segments),
        largest=max((b["size"] for b in blocks if b["state"] == "inactive"), default=0),
    )
    # <<< solution


class Peak(NamedTuple):
    """The moment of a history in which most bytes were in use."""

    size: int  # bytes in use
    owners: list[tuple[str, int]]  # makers and their bytes at the peak, most bytes first
    last: str  # the maker of the allocation that reached the peak


def at_peak(history: Iterable[dict]) -> Peak:
    """Replay a device trace and return its peak. A block is in use until free_completed."""
    # >>> solution 8: track the blocks in use by addr, and their sum; at a new peak, note makers
    living, used, highest = {}, 0, Peak(0, [], "")
    for entry in history:
        if entry["action"] == "alloc":
            living[entry["addr"]] = entry
            used += entry["size"]
            if used > highest.size:
                held = Counter()
                for each in living.values():
                    held[maker(each)] += each["size"]
                highest = Peak(used, held.most_common(), maker(entry))
        elif entry["action"] == "free_completed" and entry["addr"] in living:
            used -= living.pop(entry["addr"])["size"]
    return highest
    # <<< solution


def profile_memory(run: Callable[[], object], path: str | Path) -> None:
    """Run `run()` under the profiler, and write a trace with its CPU allocations."""
    # >>> solution 8: profile the CPU, with memory, while run() runs; export_chrome_trace
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    # <<< solution


def as_history(path: str | Path) -> list[dict]:
    """Convert the memory events of a trace of the profiler to entries of a device trace."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    kinds = ("cpu_op", "cpu_instant_event")
    events = [event for event in events if event.get("cat") in kinds]
    around, history = [], []  # the operators that have started and not ended
    for event in sorted(events, key=lambda event: (event["ts"], -event.get("dur", 0))):
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
            around.pop()
        if event["cat"] == "cpu_op":
            around.append(event)
        elif event["name"] == "[memory]":
            size, names = event["args"]["Bytes"], [each["name"] for each in reversed(around)]
            entry = {"addr": event["args"]["Addr"], "size": abs(size), "stream": 0}
            entry["frames"] = frames_of(names)
            actions = ["alloc"] if size > 0 else ["free_requested", "free_completed"]
            history += [{"action": action} | entry for action in actions]
    return history


class Event(NamedTuple):
    """A tensor is allocated (size > 0) or freed (size 0)."""

    name: str
    size: int


def long_lived_first(trace: Sequence[Event]) -> list[Event]:
    """Return a new list: events of tensors that are never freed, then all other events.

    Both groups keep their order, and `trace` stays unchanged.
    """
    # >>> solution 8: find the names that are freed; put the events of all other names first
    freed = {event.name for event in trace if event.size == 0}
    return sorted(trace, key=lambda event: event.name in freed)
    # <<< solution


# %%
def replay(trace: Iterable[Event], allocator: Allocator) -> int:
    """Replay a trace with an allocator, and return the highest address that it used."""
    starts, top = {}, 0
    for event in trace:
        if event.size:
            starts[event.name] = allocator.malloc(event.size, event.name.rpartition(" ")[0])
            top = max(top, max(p.start + p.size for p in allocator.pieces if p.used))
        else:
            allocator.free(starts.pop(event.name))
    return top


class Recorder(Memory):
    """Record the allocations of the code that runs inside of it, as a trace."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.trace: list[Event] = []
        self.names: dict[int, str] = {}

    def add(self, storage: torch.UntypedStorage, maker: str) -> None:
        key, known = storage._cdata, storage._cdata in self.living
        super().add(storage, maker)
        if not known and key in self.living:
            self.names[key] = f"{maker} {len(self.trace)}"
            self.trace.append(Event(self.names[key], self.living[key][1]))

    def remove(self, key: int) -> None:
        super().remove(key)
        self.trace.append(Event(self.names.pop(key), 0))


def layers_trace() -> list[Event]:
    """Return a trace: activations and statistics of twelve layers, then a large tensor."""
    trace = []
    for layer in range(12):
        trace += [
            Event(f"activations {layer}", 600 * KIB),
            Event(f"statistics {layer}", 100 * KIB),
        ]
    trace += [Event(f"activations {layer}", 0) for layer in reversed(range(12))]
    return [*trace, Event("large", 4 * MIB), Event("large", 0)]


if __name__ == "__main__":

    def two_steps(where: torch.device | str) -> nn.Module:
        model, (inputs, targets) = build_model(where), make_batch(device=where)
        adam = make_adam(model)
        for _ in range(2):
            mean_square(model(inputs), targets).backward()
            adam.step()
            adam.zero_grad()
        return model

    def say(whose: str, peak: Peak) -> None:
        owners = ", ".join(f"{name} {size / MIB:.2f}" for name, size in peak.owners[:3])
        print(f"{whose}: the peak is ≈{peak.size / MIB:.2f} MiB, reached by {peak.last}")
        print(f"        most bytes at the peak, in MiB: {owners}")

    def say_account(numbers: Account) -> None:
        parts = zip(Account._fields, numbers, strict=True)
        print(
            "        afterwards, in MiB: "
            + ", ".join(f"{name} {n / MIB:.2f}" for name, n in parts)
        )

    def check_peaks() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            profile_memory(lambda: two_steps("cpu"), path)
            profiled = at_peak(as_history(path))
        with Recorder(torch.device("cpu")) as recorder:
            model = two_steps("cpu")
        allocator = Allocator(16 * MIB)
        top = replay(recorder.trace, allocator) / MIB
        snapshot, kept = allocator.snapshot(), sum(p.nbytes for p in model.parameters())
        peak, numbers = at_peak(snapshot["device_traces"][0]), account(snapshot["segments"])
        say("step 8: two steps on the CPU, from the profiler", profiled)
        say(
            f"        from the snapshot of the allocator, with {top:.2f} MiB of addresses", peak
        )
        say_account(numbers)
        ask(
            peak.size == recorder.peak <= profiled.size < 1.1 * recorder.peak,
            f"the peak is {recorder.peak:,} bytes, but at_peak returns {peak.size:,} for the"
            f" snapshot and {profiled.size:,} for the trace of the profiler",
        )
        ask(
            kept <= numbers.requested <= numbers.allocated <= numbers.reserved == 16 * MIB,
            f"the model has {kept:,} bytes, and account returns {numbers}",
        )

    def check_cuda() -> None:
        torch.cuda.memory._record_memory_history(stacks="python")
        model = two_steps(device)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        stats, numbers = torch.cuda.memory_stats(), account(snapshot["segments"])
        del model
        peak = at_peak(snapshot["device_traces"][torch.cuda.current_device()])
        say("        two steps on the GPU, from its snapshot", peak)
        say_account(numbers)
        for name in ("requested", "allocated", "reserved"):
            true, found = stats[f"{name}_bytes.all.current"], getattr(numbers, name)
            ask(found == true, f"{name}: account returns {found:,}, and memory_stats {true:,}")

    def check_order() -> None:
        trace, allocator = layers_trace(), Allocator(LIMIT)
        try:
            replay(trace, allocator)
        except OutOfMemory as error:
            print(f"        in the given order: {error}")
        else:
            raise AssertionError("the large tensor should run out of memory")
        numbers = account(allocator.snapshot()["segments"])
        largest = f"the largest piece has {numbers.largest / MIB:.2f} MiB"
        ask(
            largest in str(allocator.out_of_memory(0)),
            f"account returns {numbers.largest:,} bytes for the largest free block",
        )
        fixed = long_lived_first(trace)
        ask(sorted(fixed) == sorted(trace), "long_lived_first does not return the same events")
        top = replay(fixed, Allocator(LIMIT))
        print(f"        long-lived tensors first: it fits, in {top / MIB:.2f} MiB of addresses")

    check_peaks()
    if device.type == "cuda":
        check_cuda()
    check_order()
    print("seven programs that ran out of memory fit now, and their results are the same")

# %% [markdown]
# ## Where to go from here
#
# - In step 1, use `torch.autograd.graph.saved_tensors_hooks` to list what is saved, with
# shapes. Which row of the table do you find twice, and why does it count only once? - Let the
# two functions of `saved_tensors_hooks` move activations to a file, or on a GPU to pinned
# memory of the host, instead of computing them again. What does this cost? - Give
# `AdamInBackward` two micro-batches. What does it compute, and why is this not the result of
# step 5? - In step 6, remove the line that restores the state of the generator, and print the
# masks of two steps. - On a GPU, compare `torch.cuda.max_memory_allocated()` with `peak` in
# each step, and then `max_memory_reserved()`. Where do the differences come from?
