# %% [markdown]
# # Lab 08: Fix out-of-memory errors
#
# A step of training needs more than the model: gradients, optimizer states, what autograd keeps
# for backward, and temporaries. When their sum passes what the device has, PyTorch says *out of
# memory*, at whatever line asked last, which is seldom the line at fault. In this lab seven
# programs run out of memory under a limit of 10 MiB. You build a meter that says where the
# bytes are, and fix one program after the other, each with another tool: let go, do not
# record, update in place, cut the batch, compute again, choose what to compute again, and put
# the pieces in order. Every time the losses or gradients must be those of the plain run. At the
# end you read from a profile, and from an allocator's snapshot, who holds the bytes.
#
#     python labs/lab08_memory.py
#
# runs the finished lab, on the CPU or on a GPU. To do it yourself:
#
#     python labs/start.py 08
#     python my_labs/lab08_memory.py
#     python labs/check.py my_labs/lab08_memory.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step; `--step 2` grades one step. Work in a clone of the repository, with its Python:
# `make test WHAT=labs` sets it up once, and `source .venv/bin/activate` puts it on the path.
#
# There are eight steps. Each has a text, one or two blanks for you to fill, and a check which
# prints what it proved. Your copy runs as far as the first blank and says in one line what
# belongs there. In `check.py` every step stands on finished versions of the other steps, so you
# can take them in any order. Allow three hours. The chapter "Memory and performance" derives
# what you write here.

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
    """End on a blank or on a failed check with one sentence from one rank."""
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
    """Fail a check with a sentence."""
    if not condition:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The model
#
# A linear layer in, eight residual blocks, a linear layer out. A block normalises, goes up to
# four times the width, applies GELU and dropout, and comes down again. Dropout is written out,
# so that it keeps the same bytes on every device: a mask of one byte for each element.
# `model(inputs, run)` lets `run(block, x)` call the blocks; you will need that in step 6.

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
    """[b, h] to [b, h]."""

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
    return block(x)


class Net(nn.Module):
    """[b, width] to [b, width]."""

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
    """The same model wherever it is built."""
    torch.manual_seed(8)
    return Net(WIDTH, hidden, [Block(hidden) for _ in range(BLOCKS)]).to(device)


def make_adam(model: nn.Module, foreach: bool = False) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-3, foreach=foreach)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


def make_batch(
    rows: int = ROWS, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, both [rows, WIDTH]."""
    inputs = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return inputs.to(device), torch.sin(3 * inputs).to(device)


# %% [markdown]
# ## The memory: counted, and limited
#
# On a GPU the allocator says no; `torch.cuda.set_per_process_memory_fraction` would let it say
# so earlier, but it counts in segments of 2 MiB and more, too coarse for 10 MiB. So here the
# lab says no, in the same way on a CPU and a GPU. `Memory` sees every operator that runs inside
# of it (a `TorchDispatchMode`) and notes each storage that an operator returns, until it is
# freed. A storage is what a tensor and its views share, so a view costs nothing. Where the sum
# would pass the limit, it raises:
#
#     out of memory: wanted 0.25 MiB with 9.81 MiB in use, the limit is 10.00 MiB
#
# `used` is what lives now, `peak` the most that ever lived at a time, both in bytes, and
# `table()` says which operators made what lives now: the question that a memory snapshot
# answers on a GPU. Numbers by themselves (a loss) are not counted, nor are batches, which exist
# before, nor what a library allocates below PyTorch's operators.


# %%
class OutOfMemory(RuntimeError):
    """More was wanted than there is."""


class Memory(TorchDispatchMode):
    """Count the bytes of live storages on one device; refuse to pass the limit."""

    def __init__(self, device: torch.device | str, limit: float = math.inf):
        super().__init__()
        self.device, self.limit = torch.device(device), limit
        self.used = self.peak = 0  # bytes
        self.living: dict[int, tuple[weakref.ref, int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in self.storages((args, kwargs))}
        for storage in self.storages(result):
            if storage._cdata not in given:  # views, and what is changed in place, are not new
                self.see(storage, func.overloadpacket.__name__)
        return result

    def storages(self, tree: object) -> list[torch.UntypedStorage]:
        """Of all tensors in there that are on our device."""
        tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return [t.untyped_storage() for t in tensors if t.device.type == self.device.type]

    def see(self, storage: torch.UntypedStorage, maker: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.living or size <= 8:
            return
        if self.used + size > self.limit:
            raise OutOfMemory(
                f"out of memory: wanted {size / MIB:.2f} MiB with {self.used / MIB:.2f} MiB"
                f" in use, the limit is {self.limit / MIB:.2f} MiB"
            )
        self.living[key] = weakref.ref(storage, lambda _: self.forget(key)), size, maker
        self.used += size
        self.peak = max(self.peak, self.used)

    def forget(self, key: int) -> None:
        self.used -= self.living.pop(key)[1]

    def table(self) -> list[tuple[str, int, int]]:
        """Operators whose results live now: name, how many results, bytes; most bytes first."""
        found: dict[str, list[int]] = {}
        for _, size, maker in self.living.values():
            found.setdefault(maker, []).append(size)
        rows = [(maker, len(sizes), sum(sizes)) for maker, sizes in found.items()]
        return sorted(rows, key=lambda row: -row[2])


def peak_of(run: Callable[[], object], device: torch.device, limit: float = math.inf) -> int:
    """Run a function within a limit; return the most bytes that it used at a time."""
    with Memory(device, limit) as memory:
        run()
    return memory.peak


if __name__ == "__main__":
    on_accelerator = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_accelerator else torch.device("cpu")
    torch.set_num_threads(1)  # the tensors are small: more threads would wait for each other

    def assert_out_of_memory(run: Callable[[], object]) -> str:
        """Run a program that must not fit; return what it says."""
        try:
            peak_of(run, device, LIMIT)
        except OutOfMemory as error:
            return str(error)
        raise AssertionError("this should not fit")

    def assert_same(ours, true, what: str) -> None:
        torch.testing.assert_close(
            ours, true, rtol=1e-4, atol=1e-6, msg=f"{what} differ from those of the plain run"
        )

# %% [markdown]
# ## Step 1: where the bytes are
#
# Who cannot predict memory can only try. So begin with a pencil. In float32, $\Psi$ parameters
# take $4\Psi$ bytes, their gradients $4\Psi$, Adam's two moments $8\Psi$. Activations are what
# autograd saves for backward, and each operator saves only what its derivative needs:
#
# | operator, for $b$ rows | saves | elements | bytes each |
# |---|---|---|---|
# | `LayerNorm` of $h$ | its input, and mean and deviation of each row | $bh + 2b$ | 4 |
# | `Linear` from $i$ to $o$ | its input | $bi$ | 4 |
# | GELU of $4h$ | its input | $4bh$ | 4 |
# | dropout of $4h$ | its mask | $4bh$ | 1 |
# | `+` | nothing | | |
# | `(outputs - targets).square()` | its input, the difference | $b \cdot$ width | 4 |
#
# A tensor that two operators save is there once. The first layer's input is the batch, which
# exists anyway. Note what is *not* saved: the output of GELU lives only until dropout has read
# it. (A `Linear` saves its weight as well, but that is a parameter.)
#
# Then measure. `memory.used` changes at four moments: when the model is built, over the
# forward, over the backward, and over Adam's first step, for that is when it makes its moments.


# %%
class Parts(NamedTuple):
    """Bytes."""

    parameters: int
    gradients: int
    states: int
    activations: int


def predict(width: int, hidden: int, blocks: int, rows: int) -> Parts:
    """What one step of Net with `blocks` blocks, dropout and Adam will need, in float32."""
    # >>> solution 1: count all parameters, also biases; then add up what the operators save
    psi = width * hidden + hidden + hidden * width + width
    psi += blocks * (2 * hidden + 2 * 4 * hidden * hidden + 4 * hidden + hidden)
    norm, up, gelu, down = hidden + 2, hidden, 4 * hidden, 4 * hidden
    mask = 4 * hidden  # of one byte each
    saved = blocks * rows * (4 * (norm + up + gelu + down) + mask)
    saved += 4 * rows * (hidden + width)  # the last layer and the loss
    return Parts(4 * psi, 4 * psi, 8 * psi, saved)
    # <<< solution


def measure_parts(
    memory: Memory, build: Callable[[], nn.Module], inputs: torch.Tensor, targets: torch.Tensor
) -> Parts:
    """The same, measured over one step, in a Memory that is empty so far."""
    # >>> solution 1: build, make_adam, forward, backward, step; read memory.used between
    # hint: after backward the activations are gone, and the gradients have come
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
# The check compares the two, and they may differ by 5%. `check.py` compares your prediction
# exactly, because every byte is in the table.

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
# This program logs the loss of each batch before and after the update, to see whether the step
# helped. It dies in the second batch, though the first fits:


# %%
def leaky_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once; log the loss of this batch before and after."""
    before = mean_square(model(inputs), targets)
    before.backward()
    adam.step()
    adam.zero_grad()
    log.append((before, mean_square(model(inputs), targets)))


# %% [markdown]
# A loss is one number and the end of a graph. The graph holds what was saved for backward, as
# long as anything refers to the loss. `backward()` frees what is saved while it goes through
# the graph; so `before` is harmless by now (only its skeleton is left, though with
# `retain_graph=True` all of it would be). Nobody calls backward on the second loss, and its
# graph stays whole, batch after batch. So the rule is: what leaves the step leaves its graph
# behind, by `.item()` (a number; on a GPU it waits for the result) or `.detach()` (a tensor).
#
# How do you find such a leak in a program that you do not know? Measure what one step leaves
# behind. The first step leaves what stays anyway, such as Adam's moments; every further one
# should leave nothing. `growth` is that measurement. A profile, `memory.table()` here, then
# says what was left.


# %%
def growth(memory: Memory, step: Callable[[], object], times: int = 3) -> float:
    """Bytes that each call of `step` leaves behind, apart from what the first one makes."""
    # >>> solution 2: one call first; then the change of memory.used over `times` calls
    step()
    before = memory.used
    for _ in range(times):
        step()
    return (memory.used - before) / times
    # <<< solution


def logged_step(model: Net, adam: torch.optim.Adam, inputs, targets, log: list) -> None:
    """Update once; log the loss of this batch before and after, and leave nothing else."""
    # >>> solution 2: as leaky_step, but what is logged has no graph
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
                f"        {name} leaves ≈{left / MIB:.2f} MiB a step" + f": {most}" * (left > 0)
            )
            if step is leaky_step:
                ask(
                    abs(left / PREDICTED.activations - 1) < 0.05,
                    f"growth finds {left:,.0f} bytes, and the activations stay",
                )
        ask(left == 0, f"logged_step leaves {left:,.0f} bytes behind")
        logs: list = []
        peak_of(lambda: logs.append(train(logged_step)), device, LIMIT)
        assert_same(torch.tensor(logs[0]), torch.tensor(train(leaky_step)), "the losses")
        print(f"        fixed: losses {logs[0][0][0]:.4f} to {logs[0][-1][1]:.4f}, as leaky")

    check_leak()

# %% [markdown]
# ## Step 3: evaluation
#
# Evaluation needs no gradients, and PyTorch does not know that. While anything requires a
# gradient, every forward saves what backward would need. `torch.no_grad()` turns recording off,
# `torch.inference_mode()` also what autograd notes about versions and views, and what comes out
# of it cannot be saved for a backward later. `model.eval()` does neither: it tells dropout and
# batch norm how to behave. You need both; and afterwards the model must be in the mode it had.
#
# The loss is the mean over all rows. Where the last batch is smaller, the mean of the batches'
# means is another number.


# %%
def evaluate(model: Net, batches: Iterable) -> tuple[float, torch.Tensor]:
    """The mean loss over all rows of the batches, and all outputs [rows, width], in order.

    Without dropout, without a graph; leaves the model in the mode it had.
    """
    # >>> solution 3: eval mode, no graph, add up losses by rows, put the outputs together, mode
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
            f"the loss is {loss:.5f}, over all rows {true_loss:.5f}",
        )
        model_bytes = PREDICTED.parameters / MIB
        print(
            f"        without: {len(outputs):,} rows in ≈{peak / MIB:.2f} MiB,"
            f" {model_bytes:.2f} of them the model; loss {loss:.4f}"
        )

    check_evaluation()

# %% [markdown]
# ## Step 4: the peak of a step
#
# A model of $h$ = 104 has $\Psi$ = 704,840 parameters: $16\Psi$ are 10.8 MiB, and it dies when
# Adam makes its moments. But the limit holds for what lives *at one time*. Three habits lower
# the peak:
#
# * **Gradients to None.** After the update nobody needs them. `zero_grad()` sets them to None
#   (`set_to_none=False` would keep $4\Psi$ bytes of zeros through the next forward, when the
#   activations come).
# * **In place, one at a time.** Adam with `foreach=True`, the default on a GPU, updates all
#   parameters in a few kernels, and its temporaries are as large as all parameters together.
#   With `foreach=False` they are those of one parameter. (`fused=True` has none, and is fast.)
# * **In backward.** Backward makes gradients one after the other. If each is used and dropped
#   as soon as it is there, $4\Psi$ bytes shrink to the largest parameter's. A hook does it:
#   `parameter.register_post_accumulate_grad_hook(function)` calls `function(parameter)` when
#   `parameter.grad` is complete. The price: nothing can look at all gradients together any
#   more, so no clipping by the norm of all, and no accumulation.
#
# Adam's update of step $t$, with gradient $g$, moments $m$ and $v$:
#
# $$m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,$$
#
# $$p \leftarrow p - \frac{\eta}{1-\beta_1^t} \frac{m}{\sqrt{v / (1-\beta_2^t)} + \epsilon}$$
#
# Methods whose name ends with `_` write into their tensor: `lerp_`, `mul_`, `addcmul_`,
# `addcdiv_`. The denominator needs one temporary of the parameter's size, nothing else does.

# %%
ETA, BETA1, BETA2, EPSILON = 1e-3, 0.9, 0.999, 1e-8


def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: int) -> None:
    """Adam's step t = 1, 2, …, in place on p, m and v, with one temporary of p's size."""
    # >>> solution 4: m, then v, then the denominator (the only new tensor), then p
    # hint: x.addcmul_(a, b, value=c) is x += c * a * b; x.addcdiv_(a, b, value=c) is c * a / b
    m.lerp_(g, 1 - BETA1)
    v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
    denominator = v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)
    p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))
    # <<< solution


class AdamInBackward:
    """From its construction on, every backward of the model is also a step of Adam."""

    def __init__(self, model: nn.Module):
        self.states = {
            p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for p in model.parameters()
        }
        # >>> solution 4: let every parameter call self.ready when its gradient is complete
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(self.ready)
        # <<< solution

    @torch.no_grad()
    def ready(self, p: nn.Parameter) -> None:
        """Use the gradient of this parameter, and drop it."""
        state = self.states[p]
        # >>> solution 4: count t up, update, let go of the gradient
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
# You want 1,024 rows a step, and the activations alone would take 22 MiB. Gradients add up in
# `.grad` until someone sets them to None. So run forward and backward for a few rows at a time,
# a **micro-batch**, and let the optimizer step once. The activations are then those of one
# micro-batch.
#
# How many rows fit? What is there in any case, plus what each row needs, must stay within the
# limit.
#
# And the loss must be the same. Here some rows are padding (`keep` is False), as tokens are in
# texts of different lengths; the loss is the mean over the rows that count. The mean of the
# micro-batches' means would give rows in a micro-batch with much padding more weight. (Hugging
# Face's Trainer computed that until October 2024.) Each micro-batch has to contribute its
# *sum*, divided by the number of rows that count in the *whole* batch. A micro-batch may also
# consist of padding alone.


# %%
def square_of_rows(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss of each row, [b]."""
    return (outputs - targets).square().mean(1)


def rows_that_fit(limit: int, fixed: int, each: int) -> int:
    """The most rows for which `fixed` bytes and `each` bytes a row are within the limit.

    Raises OutOfMemory if that is not even one.
    """
    # >>> solution 5: round down
    rows = (limit - fixed) // each
    if rows < 1:
        raise OutOfMemory("not one row fits")
    return rows
    # <<< solution


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, rows: int
) -> float:
    """Leave in .grad the gradients of the mean loss over the rows where `keep` is True.

    Runs at most `rows` rows at a time; returns that loss.
    """
    # >>> solution 5: for each piece: forward, sum over its kept rows by all kept, backward
    # hint: tensor.split(rows) gives pieces of `rows` rows, the last one may be smaller
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
        each = PREDICTED.activations // ROWS + 4 * 12 * HIDDEN  # and backward's temporaries
        rows = rows_that_fit(LIMIT, fixed, each)

        def train(size: int) -> tuple[list[float], list[torch.Tensor]]:
            model = build_model(device).eval()  # no dropout: each size would draw other masks
            adam, losses = make_adam(model), []
            for _ in range(2):  # from the second step on Adam's moments are there
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
            f"        {rows} rows fit: {-(-1024 // rows)} micro-batches, peak ≈{peak / MIB:.2f}"
            f" MiB; loss {found[0][0]:.4f} over {int(keep.sum())} rows, gradients as at once"
        )

    check_accumulation()

# %% [markdown]
# ## Step 6: compute it again
#
# Sometimes one micro-batch is still too large, or the model too deep. Then keep of each block
# only its input, and compute what is inside a second time when backward comes to it:
# **activation checkpointing**. A third more FLOPs (forward, forward again, backward at twice
# the price: 4 instead of 3), and the activations of a block shrink from about $11bh$ to $bh$
# numbers, plus those of the one block that backward is in.
#
# Write it as an `autograd.Function`. In `forward` autograd records nothing, so nothing is saved
# but what you save: tensors by `ctx.save_for_backward`, which backward frees, other things as
# attributes of `ctx`. In `backward` you get the gradient of the output. Run the block again,
# this time recording (`torch.enable_grad()`), on a copy of the input that is cut off from the
# graph and requires a gradient; and let `output.backward(gradient)` go through it. That adds
# to the parameters' `.grad`. Return a gradient for every argument of `forward`: None for the
# block.
#
# Dropout is the trap. The second forward must draw the mask of the first, or the gradients
# belong to another function. So save the generator's state before the first forward, set it
# before the second, and then put back the state that the generator had: else every random
# number after it would be drawn a second time.


# %%
def random_state(device: torch.device) -> torch.Tensor:
    """The state of the generator of random numbers on this device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class Checkpoint(torch.autograd.Function):
    """Checkpoint.apply(block, x) is block(x), of which only x is kept for backward."""

    @staticmethod
    def forward(ctx, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 6: keep the block, x, and the state of the generator; run the block
        ctx.block, ctx.state = block, random_state(x.device)
        ctx.save_for_backward(x)
        return block(x)
        # <<< solution

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        # >>> solution 6: run the block again as it ran before, recording; backward through it
        # hint: x.detach().requires_grad_() is a leaf with the numbers and the memory of x
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
    """The same by torch.utils.checkpoint, in the variant that is not reentrant."""
    # >>> solution 6: one call of checkpoint
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
                f"        {name}: peak ≈{peak / MIB:.2f} MiB, plain ≈{before / MIB:.2f}; losses"
                f" and gradients of two steps as plain, with dropout"
            )

    check_checkpoint()

# %% [markdown]
# ## Step 7: what to compute again
#
# To checkpoint every block is seldom necessary. Some layers hold much and are cheap to run
# again (activation functions, normalisation, dropout: no matrix). Others hold little and are
# expensive to run again. So choose the units whose second forward costs least and still makes
# the step fit. The net of this step has both kinds, in ten units. You know three numbers of
# each unit:
#
# | number | what it is |
# |---|---|
# | `held` | the bytes that the unit holds for backward, its input included |
# | `kept` | the bytes that it still holds if it is checkpointed: only its input |
# | `flops` | the FLOPs of its forward, which is what it costs to run the unit again |
#
# First predict the peak. When backward comes to unit $i$, the units after it have been freed,
# those before it hold what they hold, and unit $i$ itself holds everything, *whether or not it
# is checkpointed*: if so, it has just been computed again. The peak is the largest of these
# sums. So the last unit is at its worst at the very moment when everything before it is still
# there, and to checkpoint it saves nothing.
#
# Then choose. Ten units have 1,024 subsets: try all. (For a large model, this is a knapsack
# problem. `torch.utils.checkpoint.create_selective_checkpoint_contexts` leaves it to you, by a
# policy that says of each operator whether to save its result; the partitioner of
# `torch.compile` solves it, for `torch._functorch.config.activation_memory_budget`.)


# %%
class Unit(NamedTuple):
    """What a unit of a net needs; bytes and FLOPs."""

    held: int
    kept: int
    flops: int


def predicted_peak(units: Sequence[Unit], chosen: Iterable[int]) -> int:
    """The most bytes of activations at a time, if these units (by index) are checkpointed."""
    # >>> solution 7: for each unit: what those before it hold, and all of its own; the largest
    chosen, before, peak = set(chosen), 0, 0
    for i, unit in enumerate(units):
        peak = max(peak, before + unit.held)
        before += unit.kept if i in chosen else unit.held
    return peak
    # <<< solution


def choose(units: Sequence[Unit], budget: int) -> set[int] | None:
    """The units to checkpoint: fewest FLOPs for a peak within `budget`; None: nothing fits."""
    # >>> solution 7: try all subsets
    # hint: itertools.combinations(range(n), size) gives the subsets of one size
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
    """[b, h] to [b, h], without a matrix."""

    def __init__(self, hidden: int, dropout: float = DROPOUT):
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(hidden), Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(torch.sin(3 * self.norm(x))))


def build_mixed(device: torch.device | str = "cpu") -> Net:
    torch.manual_seed(8)
    blocks: list[nn.Module] = []
    for times in (4, 1, 3, 2, 4):
        blocks += [Block(HIDDEN, times=times), Wave(HIDDEN)]
    return Net(WIDTH, HIDDEN, blocks).to(device)


def measure_unit(block: nn.Module, rows: int, device: torch.device) -> Unit:
    """What a block holds for backward, measured; its FLOPs, counted."""
    with Memory(device) as memory:
        x = torch.randn(rows, HIDDEN, device=device)
        kept = memory.used
        y = block(x.requires_grad_())
        held = memory.used - y.nbytes
    matrices = sum(p.numel() for p in block.parameters() if p.ndim == 2)
    return Unit(held, kept, 2 * rows * matrices + 20 * x.numel())


if __name__ == "__main__":

    def check_choice() -> None:
        rows = 640
        inputs, targets = make_batch(rows, device=device)
        model = build_mixed(device)
        units = [measure_unit(block, rows, device) for block in model.blocks]
        psi = sum(p.numel() for p in model.parameters())
        # parameters and moments, the last layer and the loss, temporaries of a block's backward
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
            ask(abs(guess - peak) < 0.1 * peak, "the prediction is more than 10% off")
            assert_same(torch.tensor(found), torch.tensor(true), f"{name}: the losses")

    check_choice()

# %% [markdown]
# ## Step 8: enough, but in pieces
#
# The last failure says that there is enough:
#
#     out of memory: wanted 4.00 MiB; 8.83 MiB are free, the largest piece has 1.80 MiB
#
# A tensor needs one piece of addresses. PyTorch does not ask the driver for each tensor, which
# would take longer than most kernels; it keeps what it once got, and hands out pieces of it: a
# **caching allocator**. The next cell has its heart, for one piece of memory: best fit, split,
# coalesce. ([Assignment 1](../assessment/assignments.md#1-memory-a-caching-allocator) lets you
# write one, for several streams.) Even so, what stays between what goes keeps holes apart:
# **fragmentation**.
#
# What an allocator knows it tells in a **snapshot**: on a GPU `torch.cuda.memory._snapshot()`,
# here `allocator.snapshot()`, which has the same form. Two parts of it answer two questions.
#
# **How much, and in what pieces?** `segments` are what came from the driver, each a list of
# `blocks`. A block has its `size`, the `requested_size` before it was rounded up to 512 bytes,
# and a `state`: a tensor has it (`active_allocated`), Python has given it back and another
# stream may still use it (`active_pending_free`), or it is free (`inactive`). (In the docstring
# of `_snapshot`, the second state is called `active_awaiting_free`. The snapshots themselves
# contain `active_pending_free`.) A free block still has the `requested_size` of its last
# tensor. So there are four numbers:
#
# * *requested*: what tensors asked for, in both kinds of active blocks;
# * *allocated*: the sizes of tensors' blocks alone, which is `torch.cuda.memory_allocated()`;
# * *reserved*: all segments, `total_size`, which is `torch.cuda.memory_reserved()`;
# * *largest*: the largest free block. Far below what is free, it says that memory is in pieces.
#
# **Who?** `device_traces` has for each device what happened since
# `torch.cuda.memory._record_memory_history()`. An entry has an `action`, `addr`, `size` and
# `frames`, the innermost first. A tensor begins with `alloc`. It ends with `free_requested`,
# when Python lets go of it, and `free_completed`, after which its block can be given away. The
# other actions (`segment_alloc`, `oom`, `snapshot`) are not of tensors, and may lack `addr`.
# What was there before recording began ends without ever having begun. Replay it, and at its
# highest point you know who holds the bytes, and who asked last.
#
# A CPU has no such snapshot, but the profiler sees its allocator: with `profile_memory=True` it
# notes each allocation and each free, with address and bytes. `as_history` makes entries of
# them, whose frames are the operators around them. So one reader serves both. It also sees
# what the meter of this lab cannot, temporaries within an operator: here those of dropout,
# whose mask the CPU casts to float32 before it multiplies.
#
# The fix for what the last failure says is the order: what lives long is allocated first, and
# side by side. (Where you cannot change the order, PyTorch has settings:
# `expandable_segments:True` lets memory grow behind a piece by mapping more pages there,
# `max_split_size_mb` keeps large pieces from being cut, `roundup_power2_divisions` makes sizes
# alike.)


# %%
@dataclass
class Piece:
    """A piece of memory: `size` bytes from `start` on, of which a tensor asked for `asked`."""

    start: int
    size: int
    used: bool = False
    asked: int = 0


class Allocator:
    """All of its memory is in `pieces`, free or used, in the order of addresses."""

    def __init__(self, capacity: int):
        self.pieces, self.history = [Piece(0, capacity)], []

    def malloc(self, asked: int, name: str) -> int:
        """Give away at least `asked` bytes; return where they start."""
        size = -(-asked // 512) * 512
        fitting = [p for p in self.pieces if not p.used and p.size >= size]
        if not fitting:
            raise self.out_of_memory(size)
        piece = min(fitting, key=lambda p: p.size)  # best fit
        if piece.size > size:  # split
            rest = Piece(piece.start + size, piece.size - size)
            self.pieces.insert(self.pieces.index(piece) + 1, rest)
        piece.size, piece.used, piece.asked = size, True, asked
        self.note("alloc", piece, name)
        return piece.start

    def free(self, start: int) -> None:
        """Take back the piece that starts there."""
        i = next(i for i, p in enumerate(self.pieces) if p.start == start)
        self.note("free_requested", self.pieces[i])
        self.note("free_completed", self.pieces[i])  # no other stream uses it
        self.pieces[i].used = False
        for left in (i, i - 1):  # coalesce, with the right neighbour, then with the left one
            pair = self.pieces[left : left + 2] if left >= 0 else []
            if len(pair) == 2 and not pair[0].used and not pair[1].used:
                pair[0].size += pair[1].size
                del self.pieces[left + 1]

    def note(self, action: str, piece: Piece, *names: str) -> None:
        entry = {"action": action, "addr": piece.start, "size": piece.asked, "stream": 0}
        self.history.append(entry | {"frames": frames_of(names)})

    def snapshot(self) -> dict:
        """As torch.cuda.memory._snapshot() has it; all memory is one segment."""
        blocks = [
            {
                "address": p.start,
                "size": p.size,
                "requested_size": p.asked,
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
    """What stands for a stack where there are only names, the innermost first."""
    return [{"filename": "", "line": 0, "name": name} for name in names]


def maker(entry: dict) -> str:
    """Who asked for it: the innermost frame that says more than that memory was wanted."""
    names = [
        f"{Path(frame['filename']).name}:{frame['line']} {frame['name']}".removeprefix(":0 ")
        for frame in entry["frames"]
    ]
    telling = (n for n in names if not n.startswith(("aten::empty", "aten::resize_")))
    return next(telling, names[-1] if names else "nobody we know")


class Account(NamedTuple):
    """Bytes."""

    requested: int
    allocated: int
    reserved: int
    largest: int


def account(segments: Iterable[dict]) -> Account:
    """The four numbers of a snapshot's segments."""
    # >>> solution 8: add up over the blocks of all segments, by their states
    blocks = [block for segment in segments for block in segment["blocks"]]
    return Account(
        requested=sum(b["requested_size"] for b in blocks if b["state"] != "inactive"),
        allocated=sum(b["size"] for b in blocks if b["state"] == "active_allocated"),
        reserved=sum(segment["total_size"] for segment in segments),
        largest=max((b["size"] for b in blocks if b["state"] == "inactive"), default=0),
    )
    # <<< solution


class Peak(NamedTuple):
    """The highest point of a history."""

    size: int  # bytes that live
    held: list[tuple[str, int]]  # makers of what lives there and its bytes, most first
    last: str  # the maker of the allocation that reached it


def at_peak(history: Iterable[dict]) -> Peak:
    """Replay a device trace to its highest point. A block lives until its free is completed."""
    # >>> solution 8: keep what lives by its addr, and its sum; at a new maximum, note who holds
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
    """Write the profiler's trace of `run()`, with what the CPU's allocator does."""
    # >>> solution 8: profile the CPU, with memory; run; export_chrome_trace
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    # <<< solution


def as_history(path: str | Path) -> list[dict]:
    """What a profiler's trace says of memory, as entries of a device trace."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    kinds = ("cpu_op", "cpu_instant_event")
    events = [event for event in events if event.get("cat") in kinds]
    around, history = [], []  # the operators that have begun and not ended
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
    """A tensor comes (size > 0) or goes (size 0)."""

    name: str
    size: int


def long_lived_first(trace: Sequence[Event]) -> list[Event]:
    """Return a new list: events of tensors that are never freed, then all other events.

    Both groups keep their order, and `trace` stays unchanged.
    """
    # >>> solution 8: which names are freed? what is not freed, then the rest
    freed = {event.name for event in trace if event.size == 0}
    return sorted(trace, key=lambda event: event.name in freed)
    # <<< solution


# %%
def replay(trace: Iterable[Event], allocator: Allocator) -> int:
    """Let an allocator do what a trace says; return the highest address that was used."""
    starts, top = {}, 0
    for event in trace:
        if event.size:
            starts[event.name] = allocator.malloc(event.size, event.name.rpartition(" ")[0])
            top = max(top, max(p.start + p.size for p in allocator.pieces if p.used))
        else:
            allocator.free(starts.pop(event.name))
    return top


class Recorder(Memory):
    """Writes the trace of what runs inside of it."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.trace: list[Event] = []
        self.names: dict[int, str] = {}

    def see(self, storage: torch.UntypedStorage, maker: str) -> None:
        key, known = storage._cdata, storage._cdata in self.living
        super().see(storage, maker)
        if not known and key in self.living:
            self.names[key] = f"{maker} {len(self.trace)}"
            self.trace.append(Event(self.names[key], self.living[key][1]))

    def forget(self, key: int) -> None:
        super().forget(key)
        self.trace.append(Event(self.names.pop(key), 0))


def layers_trace() -> list[Event]:
    """Twelve layers' activations and statistics; then a large tensor."""
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
        held = ", ".join(f"{name} {size / MIB:.2f}" for name, size in peak.held[:3])
        print(f"{whose}: peak ≈{peak.size / MIB:.2f} MiB, reached by {peak.last}")
        print(f"        held there, MiB: {held}")

    def say_account(numbers: Account) -> None:
        parts = zip(Account._fields, numbers, strict=True)
        print(
            "        after it, MiB: " + ", ".join(f"{name} {n / MIB:.2f}" for name, n in parts)
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
        say("step 8: two steps on the CPU, by the profiler", profiled)
        say(f"        by the allocator's snapshot, in {top:.2f} MiB of addresses", peak)
        say_account(numbers)
        ask(
            peak.size == recorder.peak <= profiled.size < 1.1 * recorder.peak,
            f"{recorder.peak:,} bytes were in use at most, by the meter; at_peak has"
            f" {peak.size:,} for its trace, {profiled.size:,} for the profiler's",
        )
        ask(
            kept <= numbers.requested <= numbers.allocated <= numbers.reserved == 16 * MIB,
            f"the model has {kept:,} bytes, account says {numbers}",
        )

    def check_cuda() -> None:
        torch.cuda.memory._record_memory_history(stacks="python")
        model = two_steps(device)
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        stats, numbers = torch.cuda.memory_stats(), account(snapshot["segments"])
        del model
        peak = at_peak(snapshot["device_traces"][torch.cuda.current_device()])
        say("        two steps on the GPU, by its snapshot", peak)
        say_account(numbers)
        for name in ("requested", "allocated", "reserved"):
            true, found = stats[f"{name}_bytes.all.current"], getattr(numbers, name)
            ask(found == true, f"{name}: account says {found:,}, memory_stats {true:,}")

    def check_order() -> None:
        trace, allocator = layers_trace(), Allocator(LIMIT)
        try:
            replay(trace, allocator)
        except OutOfMemory as error:
            print(f"        as it comes: {error}")
        else:
            raise AssertionError("the large tensor should not fit")
        numbers = account(allocator.snapshot()["segments"])
        largest = f"the largest piece has {numbers.largest / MIB:.2f} MiB"
        ask(largest in str(allocator.out_of_memory(0)), f"account says that {largest}")
        fixed = long_lived_first(trace)
        ask(sorted(fixed) == sorted(trace), "long_lived_first gives other events")
        top = replay(fixed, Allocator(LIMIT))
        print(f"        long-lived first: fits, {top / MIB:.2f} MiB of addresses used")

    check_peaks()
    if device.type == "cuda":
        check_cuda()
    check_order()
    print("seven programs that ran out of memory fit, and compute what they did")

# %% [markdown]
# ## Where to go from here
#
# - In step 1, take `torch.autograd.graph.saved_tensors_hooks` to list what is saved, by shape.
#   Which line of the table do you find twice, and why does it count once?
# - Let the two functions of `saved_tensors_hooks` move activations to a file (or, on a GPU, to
#   pinned memory on the host) instead of computing them again. What is the price now?
# - Give `AdamInBackward` two micro-batches. What is computed, and why is it not what step 5
#   computes?
# - In step 6, leave out the line that puts the generator's state back, and print the masks of
#   two steps.
# - On a GPU, hold `torch.cuda.max_memory_allocated()` against `peak` for each step, then
#   `max_memory_reserved()`. Where does the difference come from?
