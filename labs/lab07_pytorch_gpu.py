# %% [markdown]
# # Lab 07: Keep the GPU busy
#
# A training script for the CPU runs on a GPU after you change three lines. But then the GPU is
# often idle for most of the time. It waits for the next batch, for a copy, or for Python, or it
# has nothing to do because the host has asked for a number and waits for it. In this lab you
# move such a script to the GPU and then remove these waits one by one. With every change, the
# losses must equal those of the script on the CPU. At the end you profile a training step, and
# you read from the trace which operator takes most of the time.
#
# | step | what you write |
# |---|---|
# | 1 | `pick_device`, `Net` and `build` move the model and its constants to the device. |
# | 2 | `Sender` copies batches through pinned buffers, without a wait for each copy. |
# | 3 | `make_loader` reads batches in worker processes. |
# | 4 | `prefetch` copies the next batch while the model computes. |
# | 5 | `train_epoch` reads numbers from the device only once, after the last batch. |
# | 6 | `new_sums` and `mixed_step` train in mixed precision. |
# | 7 | `fast_optimizer`, `set_rate` and `Replayed` need fewer launches, with a graph. |
# | 8 | `measure`, `record`, `read_trace` and `hot_spot` find out what is slow. |
#
# ## How to work on this lab
#
# You need a clone of the repository and its Python environment. The command `make test
# WHAT=labs` creates the environment, and you need it only once. The command `source
# .venv/bin/activate` makes it active in your shell. You can then run the finished lab:
#
#     python labs/lab07_pytorch_gpu.py
#
# You do not need a GPU. If there is a GPU of NVIDIA, AMD or Intel, the lab uses it. Otherwise
# the lab uses a simulated device that is part of this file. Its name is `toy`, and it shows
# every mistake that a fast GPU may hide. On a machine with an NVIDIA GPU, you select the toy by
# `CUDA_VISIBLE_DEVICES= python …`. To solve the lab yourself, create a copy with blanks, run
# the copy, and have it graded:
#
#     python labs/start.py 07                             # creates my_labs/lab07_...
#     python my_labs/lab07_pytorch_gpu.py
#     python labs/check.py my_labs/lab07_pytorch_gpu.py   # grades it on the toy
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has shown. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. `check.py` grades each step separately, with finished versions of
# the other steps, so you can solve the steps in any order. With `--step 2` it grades only step
# 2.
#
# Plan three hours for the lab. Chapter 06 explains streams and events, and the chapter "Memory
# and performance" explains where the time of a step goes.

# %%
import collections
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.data import DataLoader, Dataset, RandomSampler


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
    torch.set_num_threads(1)  # more threads would only wait for each other

# %% [markdown]
# Cells that begin with `if __name__ == "__main__":` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.
#
# ## The reference: the script on the CPU
#
# The model reads signals of 12 points with 8 channels, and it predicts which of 10 frequencies
# a signal has. One sample in six has no label. Its label is −1, and it does not count. The
# script below is a typical first version, and its results are right. On a GPU it would be slow
# for three reasons. The loader reads the samples in the process that trains, every step reads
# the loss as a number, and a mask selects the rows that have a label. All later versions must
# reach the losses of this script.


# %%
LENGTH, CHANNELS, WIDTH, CLASSES = 12, 8, 32, 10
SAMPLES, BATCH, EPOCHS, RATE = 192, 16, 3, 0.01


class Signals(Dataset):
    """Signals x [s, channels], each with a label. The label is -1 if it is unknown."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        self.y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        t = torch.linspace(0, 1, LENGTH)[:, None] + torch.linspace(0, 0.1, CHANNELS)
        noise = torch.randn(SAMPLES, LENGTH, CHANNELS, generator=generator)
        self.x = 5 + 2 * torch.sin((1 + self.y[:, None, None]) * 3 * t) + 0.3 * noise
        self.y[torch.rand(SAMPLES, generator=generator) < 1 / 6] = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean and the standard deviation of each channel."""
        return self.x.mean((0, 1)), self.x.std((0, 1))


class CpuNet(nn.Module):
    """Compute logits [b, classes] from signals [b, s, channels]."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.store_moments(mean, std)
        self.embed, self.position = nn.Linear(CHANNELS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def store_moments(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.mean, self.std = mean, std

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed((x - self.mean) / self.std)  # [b, s, h]
        h = h + self.position(self.positions(x))
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h.mean(1))


def rate(epoch: int) -> float:
    """Return the learning rate of an epoch. It halves with each epoch."""
    return RATE / 2**epoch


def order(data: Dataset) -> RandomSampler:
    """Return a sampler whose order does not depend on how the samples are read."""
    return RandomSampler(data, generator=torch.Generator().manual_seed(1))


def cpu_script() -> list[tuple[float, float]]:
    """Train on the CPU, and return the mean loss and the accuracy of each epoch."""
    data = Signals()
    torch.manual_seed(0)
    model = CpuNet(*data.moments())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    loader = DataLoader(data, BATCH, sampler=order(data))
    history = []
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch)
        total, right, count = 0.0, 0, 0
        for x, y in loader:
            optimizer.zero_grad()
            logits, known = model(x), y >= 0
            loss = F.cross_entropy(logits[known], y[known])
            if loss.isnan():
                raise RuntimeError("the loss is not a number")
            loss.backward()
            optimizer.step()
            total += loss.item() * len(y[known])
            right += (logits[known].argmax(1) == y[known]).sum().item()
            count += len(y[known])
        history.append((total / count, right / count))
    return history


# %% [markdown]
# ## The toy: a device that runs everything as late as possible
#
# You may skip the code of the next cell, but you need this text. An operator with a tensor on a
# GPU only puts work into a queue, and then the call returns. The queue is called a **stream**.
# The device does the work later, and PyTorch does not promise when. A program with a missing
# wait can therefore compute right results most of the time, and wrong results now and then.
#
# The toy removes this uncertainty. It runs queued work only when something waits for it, which
# is the latest moment that is allowed. Then it runs the queue up to the place that was waited
# for. A program that depends on a fast device is therefore wrong on the toy in every run.
# Memory that has not been written to contains zeros on the toy. On a GPU it contains arbitrary
# numbers.
#
# * The tensors of the toy have `device="toy"`. The toy supports `torch.accelerator`,
#   `torch.Stream`, `torch.Event`, `pin_memory`, `record_stream`, `autocast` and the fused
#   optimizers.
# * It counts launches and copies. It also counts how often the host waits, and for what reason:
#   `torch.toy.waits`.
# * A copy from **pinned** memory with `non_blocking=True` reads its source only when the copy
#   runs. For every other copy the host waits. To pin a tensor takes 100 µs.
# * It has a clock of its own. The host needs 6 µs to launch an operator, and 20 µs to continue
#   after a wait. The device needs 7 µs for a kernel, or half of that inside a graph, and 1 µs
#   for each 25 kB that the kernel reads or writes. A copy takes 10 µs, and 1 µs for each 100
#   bytes. A copy in a different stream runs at the same time as the kernels. These numbers are
#   invented. Their ratios are those of a small model on a GPU, and they are the same in every
#   run.

# %%
aten = torch.ops.aten
LAUNCH, PIN, WAKE = 6e-6, 100e-6, 20e-6  # seconds on the host
KERNEL, COPY = 7e-6, 10e-6  # seconds on the device
KERNEL_RATE, COPY_RATE = 25e9, 100e6  # bytes per second
SHAPE_FROM_DATA = {  # operators whose result has a size that depends on the data
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.equal.default: "torch.equal",
}


class ToyStream:
    """A queue of work that was launched and has not run yet."""

    def __init__(self, device: object = None, priority: int = 0):
        self.queue: collections.deque[Callable[[], None]] = collections.deque()
        self.done, self.clock, self.outer = 0, 0.0, []
        torch.toy.streams.append(self)

    def __enter__(self) -> "ToyStream":
        self.outer.append(torch.toy.current)
        torch.toy.current = self
        return self

    def __exit__(self, *_: object) -> None:
        torch.toy.current = self.outer.pop()

    def run(self, until: int | None = None) -> None:
        """Run the queued work, up to the item with the number `until`."""
        with torch.no_grad():
            while self.queue and (until is None or self.done < until):
                self.done += 1
                self.queue.popleft()()

    def record_event(self, event: "ToyEvent | None" = None) -> "ToyEvent":
        event = event or ToyEvent()
        event.record(self)
        return event

    def wait_event(self, event: "ToyEvent") -> None:
        stream, place = event.stream, event.place
        if stream is not None:
            self.queue.append(lambda: stream.run(place))
            self.clock = max(self.clock, event.clock)

    def wait_stream(self, other: "ToyStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        torch.toy.wait("synchronize", self)

    def query(self) -> bool:
        return not self.queue

    def is_capturing(self) -> bool:
        return torch.toy.graph is not None


class ToyEvent:
    """A mark in a stream, behind all work that was launched before it."""

    def __init__(self, device: object = None, *, enable_timing: bool = False, **_: object):
        self.stream, self.place, self.clock = None, 0, 0.0

    def record(self, stream: ToyStream | None = None) -> None:
        self.stream = stream or torch.toy.current
        self.place = self.stream.done + len(self.stream.queue)
        self.clock = max(self.stream.clock, torch.toy.host)

    def wait(self, stream: ToyStream | None = None) -> None:
        (stream or torch.toy.current).wait_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        if self.stream is not None:
            torch.toy.wait("event", self.stream, self.place, self.clock)

    def elapsed_time(self, later: "ToyEvent") -> float:
        return 1e3 * (later.clock - self.clock)


class ToyDevice:
    """The device with its streams, clock and counts. It is also the module `torch.toy`."""

    def __init__(self):
        self.streams: list[ToyStream] = []
        self.pinned: dict[int, torch.Tensor] = {}
        self.graph: list | None = None  # the work of the capture that is in progress
        self.host = 0.0
        self.start_counting()

    def start_counting(self) -> None:
        """Set all counts to zero. The clock continues."""
        self.launches, self.pins, self.busy = 0, 0, 0.0  # busy: seconds of kernels
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: list[ToyStream] = []  # the stream of each copy to the device
        self.owners: dict[int, dict] = {}  # for each address: which streams use the memory
        self.allocations: list[dict] = []

    def now(self) -> float:
        """The time on the clock of the host, in seconds."""
        return self.host

    def wait(
        self, why: str, stream: ToyStream, until: int | None = None, clock: float | None = None
    ) -> None:
        """Let the host wait for a stream, up to a place in its queue."""
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {why}")
        self.waits[why] += 1
        self.catch_up(stream.clock if clock is None else clock)
        stream.run(until)

    def synchronize(self, device: object = None) -> None:
        self.waits["synchronize"] += 1
        for stream in self.streams:
            stream.run()
        self.catch_up(max(stream.clock for stream in self.streams))

    def catch_up(self, clock: float) -> None:
        """Set the clock of the host to the time at which it continues after a wait."""
        if clock > self.host:
            self.host = clock + WAKE

    def launch(self, work: Callable[[], object], seconds: float, kernel: bool = True) -> None:
        """Put work into the current stream, or into the graph during a capture."""
        self.host += LAUNCH
        self.launches += 1
        if self.graph is not None:
            self.graph.append((work, seconds))
        else:
            self.append(work, seconds, kernel)

    def append(self, work: Callable[[], object], seconds: float, kernel: bool = True) -> None:
        self.current.queue.append(work)
        self.current.clock = max(self.current.clock, self.host) + seconds
        self.busy += seconds * kernel

    def replay(self, graph: list) -> None:
        self.host += LAUNCH
        self.launches += 1
        for work, seconds in graph:
            self.append(work, seconds / 2)  # kernels of a graph have no gaps between them

    # which stream allocated a piece of memory, and which other streams use it
    def allocate(self, raw: torch.Tensor) -> None:
        owner = {"by": self.current, "used": set(), "recorded": set()}
        self.owners[raw.untyped_storage().data_ptr()] = owner
        self.allocations.append(owner)

    def use(self, raw: torch.Tensor, how: str = "used") -> None:
        owner = self.owners.get(raw.untyped_storage().data_ptr())
        if owner is not None and owner["by"] is not self.current:
            owner[how].add(self.current)

    def unrecorded(self) -> int:
        """Count the tensors that a second stream used without a call of `record_stream`."""
        return sum(bool(owner["used"] - owner["recorded"]) for owner in self.allocations)

    # functions that torch expects in the module of a device
    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class ToyTensor(torch.Tensor):
    """A tensor on the toy. `raw` contains its numbers after the queued work has run."""

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> "ToyTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(),
            dtype=raw.dtype, device="toy:0",
        )  # fmt: skip
        tensor.raw = raw
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: object) -> str:
        return repr(self.detach().cpu())[:-1] + ", device='toy:0')"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else repr(self)

    def tolist(self) -> list:
        return self.detach().cpu().tolist()

    @property
    def data(self) -> "ToyTensor":
        return self.detach()

    @data.setter
    def data(self, other: "ToyTensor") -> None:  # module.half() assigns to it
        torch.Tensor.data.__set__(self, other)
        self.raw = other.raw

    def numpy(self, **_: object):
        raise TypeError("can't convert toy:0 device type tensor to numpy. Use Tensor.cpu()")

    def record_stream(self, stream: ToyStream) -> None:
        with stream:
            torch.toy.use(self.raw, "recorded")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_on_toy(func, args, kwargs or {})


def raw(tree: object) -> object:
    """Replace the tensors of the toy in these arguments by their numbers."""
    return tree_map(lambda leaf: leaf.raw if isinstance(leaf, ToyTensor) else leaf, tree)


def run_on_toy(func, args: tuple, kwargs: dict):
    """Run one operator that has a tensor of the toy among its arguments."""
    toy, name = torch.toy, str(func).removeprefix("aten.").split(".")[0]
    target = kwargs.get("device")
    to_host = target is not None and torch.device(target).type == "cpu"
    if func is aten.copy_.default or (func is aten._to_copy.default and to_host):
        return copy(func, args, kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if isinstance(tensor, ToyTensor):
            toy.use(tensor.raw)
        elif tensor.dim() > 0:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two "
                f"devices, toy:0 and cpu! (when checking argument for {name})"
            )
    if func is aten._local_scalar_dense.default:
        toy.wait("item", toy.current)
        return func(args[0].raw)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
    raw_args, raw_kwargs = raw(args), raw(kwargs)
    returns = func._schema.returns
    aliased = any(value.alias_info and not value.alias_info.is_write for value in returns)
    if aliased or func is aten._unsafe_view.default:
        return tree_map(ToyTensor, func(*raw_args, **raw_kwargs))  # a view
    mask = func is aten.index.Tensor and any(
        index is not None and index.dtype is torch.bool for index in raw_args[1]
    )
    if mask or func in SHAPE_FROM_DATA:
        toy.wait("mask as an index" if mask else SHAPE_FROM_DATA[func], toy.current)
    traffic = sum(tensor.nbytes for tensor in tensors)
    if func._schema.is_mutable:
        cost = KERNEL + traffic / KERNEL_RATE
        toy.launch(lambda: func(*raw_args, **raw_kwargs), cost)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [
            named[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info and argument.alias_info.is_write and argument.name in named
        ]
        return (written[0] if len(returns) == 1 else tuple(written)) if returns else None
    # run it now, because the shape of the result is needed, and again when the queue runs
    if func is aten.embedding.default:  # an index that is not there yet could be invalid
        result = func(raw_args[0], torch.zeros_like(raw_args[1]), *raw_args[2:], **raw_kwargs)
    else:
        result = func(*raw_args, **raw_kwargs)
    if not isinstance(result, (torch.Tensor, tuple, list)):
        return result
    places = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def work() -> None:
        fresh = func(*raw_args, **raw_kwargs)
        for place, leaf in zip(places, tree_leaves(fresh), strict=False):
            place.copy_(leaf)

    for place in places:
        toy.allocate(place)
    traffic += sum(place.nbytes for place in places)
    if "empty" in name:
        for place in places:
            place.zero_()
    else:
        toy.launch(work, KERNEL + traffic / KERNEL_RATE)
    return tree_map(
        lambda leaf: ToyTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result
    )


def copy(func, args: tuple, kwargs: dict):
    """Copy between the host and the toy, or within the toy."""
    toy, blocking = torch.toy, True
    if func is aten.copy_.default:
        target, source = args[:2]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        target = torch.zeros(source.shape, dtype=dtype)
        blocking = not kwargs.get("non_blocking", False)
    for tensor in (target, source):
        if isinstance(tensor, ToyTensor):
            toy.use(tensor.raw)
    seconds = COPY + source.nbytes / COPY_RATE
    there, here = raw(target), raw(source).detach()
    if isinstance(target, ToyTensor) and isinstance(source, ToyTensor):
        toy.launch(lambda: there.copy_(here), KERNEL + 2 * source.nbytes / KERNEL_RATE)
    elif isinstance(source, ToyTensor):
        toy.launch(lambda: there.copy_(here), seconds, kernel=False)
        if blocking:
            toy.wait("copy to the host", toy.current)
    else:
        if not here.is_pinned():
            here, blocking = here.clone(), source.dim() > 0  # the driver uses its own buffer
        toy.launch(lambda: there.copy_(here), seconds, kernel=False)
        toy.copies.append(toy.current)
        if blocking:
            toy.wait("copy to the device", toy.current)
    return target


def install_toy() -> None:
    """Register the toy as the accelerator of torch."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        is_available = is_built = lambda self: True

        def has_primary_context(self, index: int) -> bool:
            return True

    class Guard(torch._C._acc.DeviceGuard):
        def type_(self):
            return torch._C._autograd.DeviceType.PrivateUse1

    device = ToyDevice()
    _setup_privateuseone_for_python_backend("toy", device, Hooks(), Guard())
    device.current = ToyStream()
    torch.Stream, torch.Event = ToyStream, ToyEvent
    torch.accelerator.synchronize = device.synchronize
    torch.accelerator.current_stream = lambda device=None: torch.toy.current
    torch.accelerator.set_stream = lambda stream: setattr(torch.toy, "current", stream)

    def factory(function: Callable, launches: bool) -> Callable:
        def make(*args, dtype=None, **_: object) -> ToyTensor:
            tensor = function(*args, dtype=dtype)
            torch.toy.allocate(tensor)
            if launches:
                torch.toy.launch(lambda: None, KERNEL)
            else:
                tensor.zero_()
            return ToyTensor(tensor)

        return make

    def autocast_to(dtype: torch.dtype | None, operator: Callable) -> Callable:
        def cast(*args, **kwargs):
            to = dtype or torch.get_autocast_dtype("toy")
            with torch._C._ExcludeDispatchKeyGuard(autocast_key):
                return operator(*tree_map(
                    lambda leaf: leaf.to(to) if isinstance(leaf, torch.Tensor)
                    and leaf.is_floating_point() else leaf, args), **kwargs)  # fmt: skip

        return cast

    autocast_key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    library = torch.library.Library("aten", "IMPL")
    for name in ("empty.memory_format", "empty_strided"):
        function = getattr(torch, name.partition(".")[0])
        library.impl(name, factory(function, False), "PrivateUse1")
    for name in ("arange", "arange.start", "arange.start_step"):
        library.impl(name, factory(torch.arange, True), "PrivateUse1")

    def copy_from(source, target, non_blocking=False):  # for torch.tensor(…, device="toy")
        return copy(aten.copy_.default, (target, source, non_blocking), {})

    library.impl("_copy_from", copy_from, "PrivateUse1")
    for name, dtype in (
        ("linear", None),
        ("matmul", None),
        ("layer_norm", torch.float32),
        ("cross_entropy_loss", torch.float32),
        ("softmax.int", torch.float32),
        ("log_softmax.int", torch.float32),
    ):
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, autocast_to(dtype, operator), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")

    def pin(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
        if tensor.is_pinned():
            return tensor
        pinned = tensor.detach().clone()
        torch.toy.pinned[pinned.untyped_storage().data_ptr()] = pinned
        if threading.current_thread() is threading.main_thread():  # the loader has a thread
            torch.toy.pins += 1
            torch.toy.host += PIN
        return pinned

    def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
        return (
            tensor.device.type == "cpu"
            and tensor.untyped_storage().data_ptr() in torch.toy.pinned
        )

    def with_pin(function: Callable) -> Callable:
        def made(*args, pin_memory: bool = False, **kwargs) -> torch.Tensor:
            tensor = function(*args, **kwargs)
            return tensor.pin_memory() if pin_memory else tensor

        return made

    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin, is_pinned
    for name in ("empty", "empty_like", "zeros", "zeros_like"):
        setattr(torch, name, with_pin(getattr(torch, name)))
    device.libraries = library, others  # a reference, because they end without one


if not (torch.cuda.is_available() or torch.xpu.is_available() or hasattr(torch, "toy")):
    install_toy()
TOY = getattr(torch, "toy", None)  # None if there is a GPU

if __name__ == "__main__":
    # PyTorch must know the toy before it runs its first backward pass
    REFERENCE = cpu_script()
    print("losses of the script on the CPU: " + ", ".join(f"{a:.4f}" for a, _ in REFERENCE))

# %% [markdown]
# ## Step 1: move the model to the device
#
# `torch.accelerator` works with every kind of accelerator: NVIDIA, AMD, Intel and Apple. Two of
# its functions are easily confused. `current_accelerator()` returns the kind of accelerator for
# which PyTorch was *built*. A PyTorch for CUDA returns `cuda` on a machine without a GPU, too.
# `is_available()` returns whether there is an accelerator that you can use.
#
# All tensors of one operator must be on the same device. `module.to(device)` moves the
# parameters and the **buffers** of a module. It does not move tensors that are ordinary
# attributes. A tensor that you create in `forward` is created on the CPU, unless you pass
# `device=`. You could create it on the CPU and then move it, but then every step copies it and
# waits for the copy.
#
# The optimizer needs attention, too. It updates the parameters that it was given. When a model
# moves to a device, PyTorch may replace its parameters by new ones. An optimizer that was made
# before would then update tensors that the model does not use any more. So move the model
# first, and make the optimizer afterwards.
#
# In `Net`, the mean and the standard deviation are constants that belong to the model. They
# must move with it and must be saved with it, but they must not be trained.


# %%
def pick_device() -> torch.device:
    """Return the accelerator if one is available, and otherwise the CPU."""
    # >>> solution 1: test is_available first, then return current_accelerator or the CPU
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")
    # <<< solution


class Net(CpuNet):
    """The same model, for every device."""

    def store_moments(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        # >>> solution 1: store mean and std so that they move with the module
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        # <<< solution

    def positions(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 1: return the numbers from 0 to s - 1, created on the device of x
        return torch.arange(x.shape[1], device=x.device)
        # <<< solution


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model on the device, and its optimizer. The initial weights are fixed."""
    torch.manual_seed(0)
    model = Net(*Signals().moments())
    # >>> solution 1: move the model, create torch.optim.AdamW with lr=RATE, return both
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)
    # <<< solution


# %%
def batches(count: int = SAMPLES // BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first batches on the CPU, in the order of the data."""
    data = Signals()
    return [(data.x[i : i + BATCH], data.y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)][
        :count
    ]


def batches_on(count: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the first batches on the device."""
    return [(x.to(device), y.to(device)) for x, y in batches(count)]


if __name__ == "__main__":
    DEVICE = pick_device()

    def check_device() -> None:
        model, optimizer = build(DEVICE)
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        same = updated == {id(p) for p in model.parameters()}
        ask(same, "the optimizer does not update the parameters of the model")
        if TOY:
            ask(
                DEVICE.type == "toy",
                f"there is an accelerator, but pick_device returns {DEVICE}",
            )
        where = next(model.parameters()).device.type
        ask(where == DEVICE.type, f"the parameters are on {where}")
        ask("mean" in dict(model.named_buffers()), "mean is not a buffer")
        ask("mean" in model.state_dict(), "mean is not in the state_dict of the model")
        x = batches_on(1, DEVICE)[0][0]
        if TOY:
            TOY.start_counting()
        logits = model(x)
        waits = sum(TOY.waits.values()) if TOY else 0
        ask(waits == 0, f"in forward the host waited {waits} times")
        torch.manual_seed(0)
        truth = CpuNet(*Signals().moments())(x.cpu())
        torch.testing.assert_close(
            logits.cpu(), truth, rtol=1e-3, atol=1e-4, msg="the logits differ from the CPU"
        )
        print(f"step 1: the model is on {DEVICE.type}, and its logits equal those on the CPU")

    check_device()

# %% [markdown]
# ## Step 2: copies without a wait of the host
#
# When you copy from ordinary memory to a GPU, the host waits. The reason is that the operating
# system may move ordinary memory at any time. The driver therefore copies the bytes through a
# buffer of its own. **Pinned** memory cannot be moved. The copy engine of the GPU reads it
# without help, and with `non_blocking=True` the call returns at once. To pin memory takes
# longer than a copy. So you pin a few buffers once, and use them in turn.
#
# But now there is a new danger. You must not change the source until the copy is done, and
# PyTorch does not check this. If you fill the buffer with the next batch too early, the device
# receives the next batch twice. The solution is an **event**, which is a mark in a stream. You
# record an event after each copy. Before you fill a buffer again, the host waits for the event
# of the last copy from *this* buffer. With `slots` buffers, this copy was launched `slots`
# batches ago. It is usually done by then, so the wait takes almost no time.


# %%
class Sender:
    """Copy batches to the device through `slots` pinned buffers, which are used in turn."""

    def __init__(self, like: torch.Tensor, slots: int, device: torch.device):
        self.device, self.slots, self.count = device, slots, 0
        # >>> solution 2: create self.buffers (pinned, one like `like` per slot) and self.events
        # hint: tensor.pin_memory() returns a pinned copy
        self.buffers = [torch.empty_like(like).pin_memory() for _ in range(slots)]
        self.events = [None] * slots
        # <<< solution

    def send(self, batch: torch.Tensor) -> torch.Tensor:
        """Launch the copy of a batch from the CPU. Return the tensor on the device."""
        slot = self.count % self.slots
        self.count += 1
        # >>> solution 2: wait for the last copy of this slot; fill; copy; record an event
        # hint: torch.Event(self.device) has the methods record() and synchronize()
        if self.events[slot] is not None:
            self.events[slot].synchronize()
        self.buffers[slot].copy_(batch)
        there = self.buffers[slot].to(self.device, non_blocking=True)
        self.events[slot] = torch.Event(self.device)
        self.events[slot].record()
        return there
        # <<< solution


# %%
if __name__ == "__main__":

    def check_sender() -> None:
        plain = [x for x, _ in batches()]
        sender = Sender(plain[0], 3, DEVICE)
        if TOY:
            TOY.start_counting()
        there = [sender.send(x) for x in plain]
        waits = dict(TOY.waits) if TOY else {"event": len(plain) - 3}
        for i, (a, b) in enumerate(zip(there, plain, strict=True)):
            ask(torch.equal(a.cpu(), b), f"batch {i} has wrong numbers on the device")
        allowed = len(plain) - 3
        ask(set(waits) <= {"event"}, f"the host waited: {waits}")
        events = waits.get("event", 0)
        ask(
            events <= allowed, f"the host waited {events} times, and {allowed} times are enough"
        )
        pins = TOY.pins if TOY else 0
        ask(pins == 0, f"memory was pinned {pins} times while sending")
        print(
            f"step 2: {len(plain)} batches were copied through 3 buffers, "
            f"with {allowed} waits for an event"
        )

    if DEVICE.type != "cpu":
        check_sender()

# %% [markdown]
# ## Step 3: a loader that is fast enough
#
# By default, `DataLoader` reads a batch in your process, at the moment when the loop needs the
# batch. In this time the device has nothing to do. With `num_workers`, other processes read
# batches while you train. If reading a batch takes $r$ seconds and a step takes $t$ seconds,
# you need at least $r/t$ workers. For example, with $r$ = 60 ms and $t$ = 20 ms you need 3
# workers.
#
# Two more settings save time. By default, the workers end after each epoch. The first batch of
# the next epoch then waits until new processes have started, and on some systems these import
# torch again. `persistent_workers=True` keeps the workers, but it is an error if there are no
# workers. `pin_memory=True` makes a thread copy each batch into pinned memory. This is useful
# if there is an accelerator. Without an accelerator it only causes a warning.
#
# The order of the samples must not depend on the number of workers. It comes from
# `order(data)`, which you pass as `sampler`.


# %%
def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    """Return a loader of batches of BATCH samples, in the order of the CPU script."""
    # >>> solution 3: a DataLoader with the sampler, with persistent workers, and pinned memory
    # hint: pinned memory and persistent workers are not always allowed or useful
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type != "cpu",
    )
    # <<< solution


# %%
class Readers(Dataset):
    """Sample i consists of the number of the process that reads it, and of i."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), i])


if __name__ == "__main__":

    def check_loader() -> None:
        loader = make_loader(Readers(), 2, DEVICE)
        epochs = [list(loader) for _ in range(2)]
        readers = [{int(pid) for batch in epoch for pid in batch[:, 0]} for epoch in epochs]
        ask(os.getpid() not in readers[0], "the process that trains reads the samples")
        ask(readers[0] == readers[1], "the second epoch has new workers")
        ask(
            len(readers[0]) == 2,
            f"{len(readers[0])} workers read the samples, and 2 should do it",
        )
        pinned = [batch.is_pinned() for batch in epochs[0]]
        ask(
            set(pinned) == {DEVICE.type != "cpu"},
            "batches for an accelerator must be pinned, and no others",
        )
        plain = DataLoader(Readers(), BATCH, sampler=order(Readers()))
        truth = [[batch[:, 1].tolist() for batch in plain] for _ in range(2)]
        found = [[batch[:, 1].tolist() for batch in epoch] for epoch in epochs]
        ask(found == truth, "the order of the samples is different")
        plain = make_loader(Readers(), 0, torch.device("cpu"))
        ask(not plain.pin_memory, "batches for the CPU are pinned")
        print("step 3: 2 workers read both epochs, in the order of the CPU script")

    check_loader()

# %% [markdown]
# ## Step 4: copy the next batch while this one computes
#
# In *one* stream, copies and kernels run one after the other. In two streams they can run at
# the same time, because the copy engine is a separate unit of the GPU. So while the model works
# on batch $i$, a second stream can copy batch $i + 1$. This is correct and fast if you do four
# things:
#
# * Launch the copies inside `with copies:`, and record an event there after them.
# * Before a batch is used, let the *compute* stream wait for this event, with
#   `compute.wait_event`. The host itself does not wait.
# * Launch the copy of the next batch *before* you yield this batch. The loop that uses
#   `prefetch` asks for the next batch only after it has launched its whole step. Then it is too
#   late.
# * Call `tensor.record_stream(compute)` for each tensor of a batch. The memory of the tensor
#   belongs to the stream in which it was allocated, and this is the stream of the copies. When
#   the loop drops the batch, the allocator may reuse the memory for the next copy at once,
#   while kernels still read it. `record_stream` makes the allocator wait for these kernels.
#
# The sources are pinned tensors of the loader. PyTorch does not reuse its own pinned memory
# before its copies are done. So you need no event for the host here, as you did for the buffers
# of step 2.


# %%
def prefetch(
    source: Iterable[tuple[torch.Tensor, ...]], device: torch.device
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the pinned batches of `source` on the device. Each is copied one step ahead."""
    copies = torch.Stream(device=device)
    compute = torch.accelerator.current_stream(device)

    def start(batch: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], torch.Event]:
        """Launch the copies of one batch. Return the new tensors, and the event after them."""
        # >>> solution 4: in the stream `copies`: copy without a wait, and record an event
        arrival = torch.Event(device)
        with copies:
            there = [tensor.to(device, non_blocking=True) for tensor in batch]
            arrival.record(copies)
        return there, arrival
        # <<< solution

    def hand_over(there: list[torch.Tensor], arrival: torch.Event) -> tuple[torch.Tensor, ...]:
        """Make the batch safe to use in the stream `compute`, and return its tensors."""
        # >>> solution 4: let compute wait for the event, and call record_stream for each tensor
        compute.wait_event(arrival)
        for tensor in there:
            tensor.record_stream(compute)
        return tuple(there)
        # <<< solution

    # >>> solution 4: start batch i + 1 before you yield batch i, and yield the last one, too
    upcoming = None
    for batch in source:
        following = start(batch)
        if upcoming is not None:
            yield hand_over(*upcoming)
        upcoming = following
    if upcoming is not None:
        yield hand_over(*upcoming)
    # <<< solution


# %%
def pinned_batches(count: int = SAMPLES // BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.pin_memory(), y.pin_memory()) for x, y in batches(count)]


if __name__ == "__main__":

    def check_prefetch() -> None:
        weight = torch.randn(CHANNELS, 64, generator=torch.Generator().manual_seed(2))
        there = weight.to(DEVICE)
        source = pinned_batches()
        if TOY:
            TOY.start_counting()
        sums, copied = [], []
        for x, y in prefetch(source, DEVICE):
            copied.append(len(TOY.copies) // 2 if TOY else 2)
            for _ in range(20):  # this is the step
                result = (x @ there).relu().sum() + y.sum()
            sums.append(result)
        if TOY:
            ask(not TOY.waits, f"the host waited: {dict(TOY.waits)}")
            ask(
                copied[0] == 2,
                f"{copied[0]} batches were copied before the first yield, and not 2",
            )
            ask(not TOY.unrecorded(), "compute uses tensors without record_stream")
            ask(TOY.current not in TOY.copies, "copies are in the stream of the kernels")
        ask(len(sums) == len(source), f"prefetch yielded {len(sums)} of {len(source)} batches")
        ask(
            not list(prefetch([], DEVICE)),
            "prefetch yields something for a source without batches",
        )
        for i, (x, y) in enumerate(source):
            right = (x @ weight).relu().sum() + y.sum()
            close = torch.allclose(sums[i].cpu(), right, rtol=1e-4)
            ask(close, f"batch {i} was used before its copy was done")
        print(
            f"step 4: {len(sums)} batches were copied one step ahead, and the host never waited"
        )

    if DEVICE.type != "cpu":
        check_prefetch()

# %% [markdown]
# ## Step 5: a training loop without waits
#
# As long as the host only launches work, it runs ahead of the device, and the queue of the
# device is never empty. This ends when Python needs a number from the device. The host waits
# until the queue is empty. After that, the device waits until the host has launched new work.
# All of these wait for a number: `.item()`, `float(t)`, `print(t)`, `if loss.isnan()` and
# `.cpu()`. An operator whose result has a *shape* that depends on the data waits as well. An
# example is `logits[known]`, because the host must know how many rows are selected.
#
# The loop needs none of them:
#
# * You need no mask for samples without a label, because `F.cross_entropy` has the argument
#   `ignore_index`. You can count samples by the sum of a comparison.
# * Add up losses and counts in tensors on the device, and read them once, at the end of the
#   epoch. Detach the loss before you add it. Otherwise the sum keeps the graph of every step in
#   memory.
# * The mean loss of the epoch is a mean over samples. So multiply the mean loss of each batch
#   by the number of its labelled samples.
# * You can test for NaN at the end of the epoch, because a sum that contains NaN remains NaN.


# %%
def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[float, float]:
    """Train on batches that are on the device. Return the mean loss and the accuracy."""
    # >>> solution 5: write the loop of cpu_script so that the host waits only at the end
    # hint: F.cross_entropy(..., ignore_index=-1), a tensor of three sums, sums.tolist()
    sums = None  # three sums: losses, right answers, labelled samples
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum()
        right = (logits.argmax(1) == y).sum()
        new = torch.stack([loss.detach() * known, right.float(), known.float()])
        sums = new if sums is None else sums + new
    total, right, count = sums.tolist()
    if total != total:
        raise RuntimeError("the loss is not a number")
    return total / count, right / count
    # <<< solution


# %%
def epoch_with_waits(model, optimizer, source) -> tuple[float, float]:
    """Train with the loop of the CPU script, which waits in every step."""
    total, right, count = 0.0, 0, 0
    for x, y in source:
        optimizer.zero_grad()
        logits, known = model(x), y >= 0
        loss = F.cross_entropy(logits[known], y[known])
        if loss.isnan():
            raise RuntimeError("the loss is not a number")
        loss.backward()
        optimizer.step()
        total += loss.item() * len(y[known])
        right += (logits[known].argmax(1) == y[known]).sum().item()
        count += len(y[known])
    return total / count, right / count


if __name__ == "__main__":

    def check_loop() -> None:
        model, optimizer = build(DEVICE)
        source = batches_on(12, DEVICE)
        if TOY:
            TOY.start_counting()
        loss, accuracy = train_epoch(model, optimizer, source)
        waits = dict(TOY.waits) if TOY else {}
        ask(sum(waits.values()) <= 4, f"the host waited: {waits}")
        model, optimizer = build(torch.device("cpu"))
        truth = epoch_with_waits(model, optimizer, batches())
        close = abs(loss - truth[0]) < (1e-4 if TOY else 1e-2)
        close = close and abs(accuracy - truth[1]) < 0.02
        ask(close, f"loss and accuracy are {loss, accuracy}, and on the CPU {truth}")
        print("step 5: the loss and the accuracy of an epoch equal those on the CPU")
        if TOY:
            print(f"        number of waits of the host in 12 steps: {sum(waits.values())}")

    check_loop()

# %% [markdown]
# ## Step 6: 16 bits where they do no harm
#
# Tensor cores multiply bf16 matrices several times faster than fp32 matrices. Under
# `torch.autocast(device.type, dtype=torch.bfloat16)`, matrix products therefore run in bf16.
# Norms, softmax and most losses still run in fp32. The parameters also stay in fp32, because
# each operator converts its own inputs. So you do *not* convert the model. Autocast works only
# for the type of device that you name, so pass the type of the device on which the tensors are.
#
# * The forward pass and the loss belong inside of autocast, and the backward pass belongs
#   outside. Each backward operator uses the dtype of its forward operator.
# * The output of the last linear layer is bf16. Inside of autocast, `F.cross_entropy` returns
#   an fp32 loss. On CUDA the log-softmax of this loss is computed in bf16, unless you pass
#   `logits.float()`. Outside of autocast, the loss itself would be bf16.
# * Sums over an epoch must be fp32. A bf16 number has 8 significant bits, so in bf16 the sum
#   256 + 1 is 256. If you count one by one, the count never exceeds 256.
#
# The function `mixed_step` adds three numbers to `sums`: the sum of the losses, the number of
# right answers, and the number of labelled samples, as in step 5. It must add them in place.
# Step 7 needs this, because a graph works on fixed addresses.


# %%
def new_sums(device: torch.device) -> torch.Tensor:
    """Return three zeros, for the sums of losses, right answers and labelled samples."""
    # >>> solution 6: three zeros on the device, in a dtype that is precise enough for sums
    return torch.zeros(3, device=device)
    # <<< solution


def mixed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """Train one step in mixed precision, and add to `sums`. The host never waits."""
    # >>> solution 6: forward and loss under autocast; backward; step; add to sums in place
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
    loss.backward()
    optimizer.step()
    known = (y >= 0).sum()
    right = (logits.argmax(1) == y).sum()
    sums += torch.stack([loss.detach() * known, right, known])
    # <<< solution


# %%
if __name__ == "__main__":

    def check_mixed() -> None:
        model, optimizer = build(DEVICE)
        seen = []
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(
                    lambda *a, name=name: seen.append((name, a[2].dtype))
                )
        source, sums = batches_on(12, DEVICE), new_sums(DEVICE)
        wide = sums.dtype in (torch.float32, torch.float64)
        ask(wide, f"the dtype of the sums is {sums.dtype}")
        for x, y in source:
            mixed_step(model, optimizer, x, y, sums)
        ask(
            {dtype for _, dtype in seen} == {torch.bfloat16},
            f"the products are in {seen[0][1]}",
        )
        dtypes = {p.dtype for p in model.parameters()}
        ask(dtypes == {torch.float32}, f"the parameters are in {dtypes}")
        total, _, count = sums.tolist()
        ask(count > 0, "after an epoch, the sums are still 0")
        truth = train_epoch(*build(DEVICE), source)
        off = abs(total / count - truth[0]) / truth[0]
        ask(off < 0.03, f"the loss is {total / count:.4f}, and in fp32 {truth[0]:.4f}")
        ask(
            count == sum(int((y >= 0).sum()) for _, y in source),
            f"the sum of labelled samples is {count}",
        )
        print(
            f"step 6: products are in bf16, parameters and sums in fp32; "
            f"the loss is ≈{total / count:.3f}"
        )

    check_mixed()

# %% [markdown]
# ## Step 7: fewer launches
#
# A step of this model has about 150 operators. The host must launch each of them, and each does
# only a little work. There are two remedies.
#
# **Larger kernels.** An optimizer that is not fused launches about a dozen operators for every
# parameter. `fused=True` updates all parameters with one or two kernels.
#
# **A graph.** While a stream is *captured*, nothing runs. The graph only records which
# operators were launched, and on which addresses they work. `replay()` then launches all of
# them at once. Four rules follow:
#
# * The inputs must be at the same addresses in every replay. So allocate two tensors of your
#   own, capture the step with them, and copy each batch *into* them. If you assign a new tensor
#   to the same name, the graph does not notice it.
# * The capture runs nothing. So you must replay the graph for the batch of the capture, too.
# * Run a few steps without a graph first. The optimizer allocates its states in its first step.
#   If this happened during the capture, every replay would set the states to zero again. These
#   first steps may be real training steps.
# * A number of Python is frozen in the graph. So the learning rate must be a tensor on the
#   device, and `set_rate` writes a new value into this tensor. The optimizer must be created
#   with `capturable=True`.
#
# `torch.compile` can do more. It makes larger kernels for the forward and the backward pass,
# and with `mode="reduce-overhead"` it uses such graphs. The chapter "Memory and performance"
# explains it.


# %%
def new_graph(device: torch.device) -> tuple[object, Callable]:
    """Return an empty graph and a function `capture`, for `with capture(graph):`."""
    if device.type == "toy":
        return ToyGraph(), ToyGraph.capture
    if device.type == "cuda":  # NVIDIA or AMD; a thread of the loader may pin memory
        capture = functools.partial(torch.cuda.graph, capture_error_mode="thread_local")
        return torch.cuda.CUDAGraph(), capture
    module = torch.get_device_module(device)
    return module.XPUGraph(), module.graph


class ToyGraph:
    """A graph of the toy, which is a list of work."""

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        torch.toy.graph = self.nodes = []
        try:
            yield
        finally:
            torch.toy.graph = None

    def replay(self) -> None:
        torch.toy.replay(self.nodes)


def fast_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with few kernels. A captured step can get a new learning rate."""
    device = next(model.parameters()).device
    # >>> solution 7: AdamW, fused and capturable; lr is RATE as a tensor on the device
    rate = torch.tensor(RATE, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    # <<< solution


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Change the learning rate, also for a step that was captured."""
    # >>> solution 7: write into the tensor of the optimizer
    for group in optimizer.param_groups:
        group["lr"].fill_(value)
    # <<< solution


class Replayed:
    """Run `step(x, y)` `warm` times without a graph. Then capture it once and replay it."""

    def __init__(self, step: Callable[[torch.Tensor, torch.Tensor], None], warm: int = 2):
        self.step, self.warm, self.graph = step, warm, None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        # >>> solution 7: call step `warm` times; then capture once; then copy and replay
        # hint: self.graph, capture = new_graph(x.device), and then with capture(self.graph):
        if self.warm > 0:
            self.warm -= 1
            self.step(x, y)
            return
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            self.graph, capture = new_graph(x.device)
            with capture(self.graph):
                self.step(self.x, self.y)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        # <<< solution


# %%
def replayed_epochs(model: nn.Module, device: torch.device) -> Callable:
    """Return a function that trains an epoch with a graph: (source, rate) to mean loss."""
    optimizer, sums = fast_optimizer(model), new_sums(device)
    replayed = Replayed(lambda x, y: mixed_step(model, optimizer, x, y, sums))

    def epoch(source: Iterable, rate: float) -> float:
        set_rate(optimizer, rate)
        sums.zero_()
        for x, y in source:
            replayed(x, y)
        total, _, count = sums.tolist()
        return total / count

    return epoch


def plain_epochs(model, optimizer, train: Callable) -> Callable:
    """Return a function that trains an epoch with `train`: (source, rate) to mean loss."""

    def epoch(source: Iterable, rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        return train(model, optimizer, source)[0]

    return epoch


def mixed_epoch(model, optimizer, source) -> tuple[float, float]:
    """Train an epoch by `mixed_step`. Return the mean loss and the accuracy."""
    sums = new_sums(next(model.parameters()).device)
    for x, y in source:
        mixed_step(model, optimizer, x, y, sums)
    total, right, count = sums.tolist()
    return total / count, right / count


if __name__ == "__main__":

    def check_replay() -> None:
        source, results = batches_on(12, DEVICE), []
        for way in (
            plain_epochs(*build(DEVICE), mixed_epoch),
            replayed_epochs(build(DEVICE)[0], DEVICE),
        ):
            losses = []
            for number in range(EPOCHS):
                if TOY:
                    TOY.start_counting()
                losses.append(way(source, rate(number)))
            results.append((losses, TOY.launches if TOY else 0))
        (truth, plain), (losses, launches) = results
        for number, (a, b) in enumerate(zip(losses, truth, strict=True)):
            right = abs(a - b) < (1e-3 if TOY else 3e-2) * b
            ask(right, f"epoch {number}: the loss is {a:.4f}, and without a graph {b:.4f}")
        ask(
            not TOY or launches < plain / 10,
            f"a replayed step has {launches / 12:.0f} launches",
        )
        (group,) = fast_optimizer(build(DEVICE)[0]).param_groups
        ask(
            group["fused"] and group["capturable"],
            "AdamW is not fused, or it is not capturable",
        )
        print("step 7: with a graph, the losses equal those without a graph")
        if TOY:
            print(
                f"        launches per step: {plain / 12:.0f}, with a graph {launches / 12:.0f}"
            )

    if DEVICE.type != "cpu":
        check_replay()

# %% [markdown]
# ## Step 8: measure it rightly, then name what is slow
#
# <!-- not of the glossary: hot spot -->
#
# A launch returns at once. If you read a clock before and after a step, you therefore measure
# how fast Python launches, and not how fast the device computes. A correct measurement follows
# three rules:
#
# * The first steps are slower, because memory is allocated, kernels are selected and code is
#   compiled. So run `warm` steps before you measure.
# * Call `torch.accelerator.synchronize()` before you read the clock, so that the device is
#   done. Do this before the first reading, too. Otherwise you also measure earlier work that is
#   still in the queue.
# * Report the median. Now and then a step is slow for a reason that has nothing to do with it.
#
# Such waits belong in a measurement and nowhere else. The argument `clock` is
# `time.perf_counter`, or the clock of the toy.
#
# A clock shows how long a step takes. A **profile** shows which operators take this time.
# `torch.profiler` records every operator with its start and its duration. With
# `record_shapes=True` it also records the shapes of the inputs. A `schedule` leaves the first
# steps out of the recording, and `profiler.step()` tells the profiler that a step is over. The
# profiler writes a list of events, `traceEvents`, as JSON. [Perfetto](https://ui.perfetto.dev)
# can draw this file. The events look like this, with times in µs and with a few more keys:
#
#     {"cat": "user_annotation", "name": "ProfilerStep#3", "tid": 1, "ts": 80.0, "dur": 90.0}
#     {"cat": "cpu_op", "name": "aten::matmul", "tid": 1, "ts": 90.5, "dur": 40.0,
#      "args": {"Input Dims": [[9, 9], [9, 2]]}}
#     {"cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 92.0, "dur": 36.5,
#      "args": {"Input Dims": [[9, 9], [9, 2]]}}
#
# If an event lies within another event of the same thread (`tid`), the outer event has called
# the inner event. Here `matmul` calls `mm`. If you sort by duration, such wrappers come first,
# because the duration of `matmul` contains the whole duration of `mm`. You want to sort by the
# **own time** of an operator, which the table of the profiler calls *self*. It is the duration
# of the operator minus the durations of the operators that it calls directly. In the example,
# `matmul` has an own time of 40.0 − 36.5 = 3.5 µs. One name with inputs of two shapes does two
# kinds of work. For example, the backward pass of the model computes products, too. So each row
# of your table is a name together with its shapes.
#
# The function `slow_step` trains on raw signals of 512 points, and it smooths them first. The
# smoothing is the hot spot of this step. Profile the step, read the trace, and name the
# operator that takes most of the time.
#
# On a GPU the trace also contains the kernels, as events with `"cat": "kernel"`. The duration
# of an operator is then the time of its launch. To see more, use Nsight Systems. It also shows
# the driver, the operating system and all ranks:
#
#     nsys profile --trace=cuda,nvtx,osrt --output=step python my_labs/lab07_pytorch_gpu.py
#     nsys stats --report cuda_gpu_kern_sum,cuda_api_sum step.nsys-rep
#
# This lab does not run Nsight Systems. It is a program of NVIDIA for GPUs of NVIDIA, and it is
# not a Python package.


# %%
def measure(
    work: Callable[[], object], clock: Callable[[], float], warm: int = 3, repeats: int = 7
) -> float:
    """Return the median number of seconds until the device has done `work()`."""
    # >>> solution 8: call work `warm` times; then return the median time of `repeats` calls
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = clock()
        work()
        torch.accelerator.synchronize()
        times.append(clock() - begin)
    return statistics.median(times)
    # <<< solution


class Row(NamedTuple):
    """One operator with inputs of certain shapes. The numbers are those of one step."""

    name: str
    shapes: list  # the shapes of its inputs, as they are in the trace
    calls: float
    own: float  # own time in µs


def record(step: Callable[[], object], path: str | Path, warm: int = 2, count: int = 2) -> None:
    """Call `step` `warm` times, then write a trace, with shapes, of `count` more calls."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    # >>> solution 8: profile with a schedule and shapes; step(), profiler.step(); export
    # hint: schedule(wait=0, warmup=…, active=…, repeat=1) and profiler.export_chrome_trace
    plan = schedule(wait=0, warmup=warm, active=count, repeat=1)
    with profile(activities=activities, schedule=plan, record_shapes=True) as profiler:
        for _ in range(warm + count):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    # <<< solution


def read_trace(path: str | Path) -> list[Row]:
    """Return a row for each name and shapes in a trace, with the most own time first."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    # >>> solution 8: own times per thread, added up by name and shapes, per step
    # hint: sort by start, and for equal starts the longest first; keep a stack for each tid
    steps = sum(name.startswith("ProfilerStep") for name in {e.get("name", "") for e in events})
    calls, own, open_in = collections.Counter(), collections.Counter(), {}
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        key = event["name"], json.dumps(event["args"].get("Input Dims", []))
        around = open_in.setdefault(event["tid"], [])  # a stack: the innermost is on top
        while around and around[-1][1] <= event["ts"]:
            around.pop()
        if around:
            own[around[-1][0]] -= event["dur"]
        calls[key] += 1
        own[key] += event["dur"]
        around.append((key, event["ts"] + event["dur"]))
    return [
        Row(name, json.loads(shapes), calls[name, shapes] / steps, time / steps)
        for (name, shapes), time in own.most_common()
    ]
    # <<< solution


# %%
POINTS = 512
NEAR = (torch.arange(POINTS)[:, None] - torch.arange(POINTS)).abs() <= 1
MEANS = NEAR / NEAR.sum(1, keepdim=True)  # [points, points]: the mean of three neighbors


def smooth_by_sample(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Smooth x [b, points, channels] with one matrix product for each sample."""
    return torch.stack([means @ sample for sample in x])


def smooth_at_once(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """Smooth x with one operator, which reads each point 3 times instead of 512 times."""
    smooth = F.avg_pool1d(x.transpose(1, 2), 3, 1, padding=1, count_include_pad=False)
    return smooth.transpose(1, 2)


def slow_step(device: torch.device, smooth: Callable = smooth_by_sample) -> Callable[[], None]:
    """Return a training step on raw signals. The model gets every 43rd point of them."""
    model, optimizer = build(device)
    _, y = batches_on(1, device)[0]
    x = torch.randn(BATCH, POINTS, CHANNELS, generator=torch.Generator().manual_seed(8))
    x, means = x.to(device), MEANS.to(device)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(smooth(x, means)[:, :: POINTS // LENGTH + 1])
        F.cross_entropy(logits, y, ignore_index=-1).backward()
        optimizer.step()

    return step


def hot_spot() -> tuple[str, list, int]:
    """Return the operator at the hot spot of slow_step, its shapes, its calls per step."""
    # >>> solution 8: return the name, shapes and calls of the first row of your table
    # hint: record(slow_step(torch.device("cpu")), path), then read_trace(path); it needs step 1
    return "aten::mm", [[POINTS, POINTS], [POINTS, CHANNELS]], BATCH
    # <<< solution


# %%
if __name__ == "__main__":

    def check_measure() -> None:
        clock = TOY.now if TOY else time.perf_counter
        model, optimizer = build(DEVICE)
        source = batches_on(1, DEVICE)
        seconds = measure(lambda: train_epoch(model, optimizer, source), clock)
        ask(seconds > 0, "measure returns no time")
        x, calls = torch.ones(1 << 16, device=DEVICE), []

        def many() -> None:  # three slow calls at the start, and one slow call later
            calls.append(1)
            if TOY and (len(calls) <= 3 or len(calls) == 6):
                TOY.host += 0.01
            for _ in range(20):
                x.add_(1)

        whole = measure(many, clock)
        if TOY:
            kernel = KERNEL + x.nbytes / KERNEL_RATE
            right = LAUNCH + 20 * kernel + WAKE
            text = f"20 kernels of {1e6 * kernel:.1f} µs take {1e6 * whole:.0f} µs"
            ask(abs(whole - right) < 1e-6, f"{text}, and this should be {1e6 * right:.0f} µs")
            print(f"step 8: {text} in total")
        else:
            print(f"step 8: a step takes ≈{1e3 * seconds:.2f} ms")

    def check_profile() -> None:
        device = torch.device("cpu") if TOY else DEVICE  # the toy computes on the CPU
        for smooth in (smooth_by_sample, smooth_at_once):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")  # for Perfetto, use a folder of yours
                record(slow_step(device, smooth), path)
                rows = read_trace(path)
            whole = sum(row.own for row in rows)
            ask(min(row.own for row in rows) >= 0, "an operator has a negative own time")
            print(
                f"        {smooth.__name__}: a step spends ≈{whole / 1e3:.2f} ms in operators"
            )
            if smooth is smooth_at_once:
                continue
            try:
                name, shapes, calls = hot_spot()
            except NotImplementedError:
                print(*rows[:3], sep="\n")
                raise
            found = [row for row in rows if (row.name, row.shapes) == (name, shapes)]
            ask(len(found) == 1, f"the trace has no {name} with the shapes {shapes}")
            ask(
                found[0].calls == calls,
                f"a step calls {name} {found[0].calls:g} times, and not {calls:g} times",
            )
            share = 100 * found[0].own / whole
            print(f"        {calls:g} calls of {name} {shapes} take ≈{share:.0f}% of it")

    if DEVICE.type != "cpu":
        check_measure()
        check_profile()

# %% [markdown]
# ## All changes together
#
# The last cell trains for three epochs in five ways. Each way uses the loader of step 3, and it
# copies its batches. Each way adds one change to the way before it. The table shows the losses.
# For the last epoch it also shows the number of launches, the number of waits of the host, the
# time on the clock of the toy, and the fraction of this time in which the device computed.
#
# Look at the last two columns first. With the loop of step 5 and with prefetching, the device
# computes almost all the time. It is busy, but busy is not fast. On the toy, autocast *costs*
# time, because every conversion is one more kernel, and a product in bf16 is not faster there.
# On a GPU, autocast saves time if the products are large. The replayed graph saves the most
# time. It does the same arithmetic with far fewer launches, and this matters because the model
# is small.
#
# A GPU does not count launches and waits, so the lab then prints only times, after ≈. On an
# H200, the replayed way took 17 ms and the other ways took 39 to 47 ms. (We measured this once,
# and there is no transcript of it.)


# %%
def copy_on_demand(source: Iterable, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Copy each batch at the moment when the loop needs it."""
    for batch in source:
        yield [tensor.to(device) for tensor in batch]


if __name__ == "__main__":

    def compare_ways() -> None:
        data, clock = Signals(), TOY.now if TOY else time.perf_counter
        loader = make_loader(data, 2, DEVICE)
        ways = [
            ("moved", copy_on_demand, lambda: plain_epochs(*build(DEVICE), epoch_with_waits)),
            ("no waits", copy_on_demand, lambda: plain_epochs(*build(DEVICE), train_epoch)),
            ("prefetched", prefetch, lambda: plain_epochs(*build(DEVICE), train_epoch)),
            ("autocast", prefetch, lambda: plain_epochs(*build(DEVICE), mixed_epoch)),
            ("replayed", prefetch, lambda: replayed_epochs(build(DEVICE)[0], DEVICE)),
        ]
        print(
            "way            losses                  launches  waits  ms an epoch  device busy"
        )
        for name, feed, begin in ways:
            loader.sampler.generator.manual_seed(1)
            epoch, losses = begin(), []
            for number in range(EPOCHS):
                if TOY:
                    TOY.start_counting()
                torch.accelerator.synchronize()
                start = clock()
                losses.append(epoch(feed(loader, DEVICE), rate(number)))
                torch.accelerator.synchronize()
                seconds = clock() - start
            for (truth, _), loss in zip(REFERENCE, losses, strict=True):
                ask(
                    abs(loss - truth) < 0.05 * truth,
                    f"{name}: {losses}, on the CPU {REFERENCE}",
                )
            about = "≈" if name in ("autocast", "replayed") else ""  # rounding in bf16 differs
            line = f"{name:11} " + " ".join(f"{about + format(v, '.4f'):>7}" for v in losses)
            if TOY:
                waits = sum(TOY.waits.values()) - 2  # without the two for the clock
                busy = TOY.busy / seconds
                line += f" {TOY.launches:11,} {waits:6}  {1e3 * seconds:11.2f}  {busy:11.0%}"
            else:
                line += f"                    ≈{1e3 * seconds:10.2f}"
            print(line)
        print("all five ways reach the losses of the CPU")

    if DEVICE.type != "cpu":
        compare_ways()
