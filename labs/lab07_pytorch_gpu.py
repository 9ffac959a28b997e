# %% [markdown]
# # Lab 07: Keep the GPU busy
#
# A script that trains on the CPU runs on a GPU after three lines are changed, and then the GPU
# is often idle most of the time: it waits for a batch, for a copy, for Python, or stands still
# because the host asked for a number. In this lab you take such a script, move it, and remove
# one wait after another, while the losses stay those of the CPU. At the end you profile a step,
# and name its hot spot from the trace.
#
#     python labs/lab07_pytorch_gpu.py
#
# runs the finished lab on your GPU (NVIDIA, AMD, Intel). Without one it brings a device of its
# own, `toy`, to which tensors really move; it is as asynchronous as a device may be: every
# mistake shows. (`CUDA_VISIBLE_DEVICES= python …` gives you the toy where there is a GPU,
# too.) To do it yourself:
#
#     python labs/start.py 07
#     python my_labs/lab07_pytorch_gpu.py
#     python labs/check.py my_labs/lab07_pytorch_gpu.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, on the toy; `--step 2` grades one step.
#
# There are eight steps. Each has a text, one or more blanks, and a check that prints what it
# proved. Your copy runs as far as the first blank and says in one line what belongs there. In
# `check.py` every step stands on finished versions of the others, so you can take them in any
# order. The chapter "GPU computing" explains streams and events, and "Memory and performance"
# where the time goes. Allow three hours.

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
    """A check: say what is wrong."""
    if not condition:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.excepthook = stop_kindly
    torch.set_num_threads(1)  # the CPU's work is small

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The toy: a device that puts everything off
#
# You may skip the code of the next cell, but not this text. An operator called on a GPU's
# tensor only goes into a queue, a **stream**, and the call returns; the device does it later.
# How much later, nobody promises. The toy does it as late as it may: *not before somebody
# waits*. Then it works off the queue up to what was waited for. So a program that is right
# only because the device was quick is wrong here, every time. (Memory that nothing has been
# written to reads as zero; on a GPU it reads as anything.)
#
# * Its tensors have `device="toy"`. `torch.accelerator`, `torch.Stream`, `torch.Event`,
#   `pin_memory`, `record_stream`, `autocast` and the fused optimizers work with it.
# * It counts launches, copies, and each wait of the host, with the reason: `torch.toy.waits`.
# * A copy from **pinned** memory with `non_blocking=True` reads its source when the queue comes
#   to it. Any other copy makes the host wait. To pin a tensor takes 100 µs.
# * It keeps a clock of its own: the host needs 6 µs to launch an operator and 20 µs to wake up
#   when it has waited, the device 7 µs for a kernel (half of that within a graph) and 1 µs for
#   each 25 kB it touches. A copy takes 10 µs and 1 µs for each 100 bytes, beside the kernels
#   if it is in another stream. The numbers are invented, with the proportions of a small model
#   on a GPU; they are the same in every run.


# %%
aten = torch.ops.aten
LAUNCH, PIN, WAKE = 6e-6, 100e-6, 20e-6  # seconds of the host
KERNEL, COPY = 7e-6, 10e-6  # seconds of the device
KERNEL_RATE, COPY_RATE = 25e9, 100e6  # bytes per second
SHAPE_FROM_DATA = {  # the size of the result is a number that only the device knows
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten._unique2.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
    aten.equal.default: "torch.equal",
}


class ToyStream:
    """What was launched and not done yet, in order."""

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
        """Do what was launched, up to number `until`."""
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
    """A mark in a stream."""

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
    """The device: streams, a clock, and counts. It is also the module `torch.toy`."""

    def __init__(self):
        self.streams: list[ToyStream] = []
        self.pinned: dict[int, torch.Tensor] = {}
        self.graph: list | None = None  # what is being captured
        self.host = 0.0
        self.start_counting()

    def start_counting(self) -> None:
        """Forget all counts; the clock goes on."""
        self.launches, self.pins, self.busy = 0, 0, 0.0  # busy: seconds of kernels
        self.waits: collections.Counter[str] = collections.Counter()
        self.copies: list[ToyStream] = []  # to the device: in which stream
        self.owners: dict[int, dict] = {}  # of memory: which streams made, used and noted it
        self.lost: list[dict] = []

    def now(self) -> float:
        """The host's clock, in seconds."""
        return self.host

    def wait(
        self, why: str, stream: ToyStream, until: int | None = None, clock: float | None = None
    ) -> None:
        """The host waits for a stream, up to a place in it."""
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
        """The host sleeps until the device has come to this time, and wakes up."""
        if clock > self.host:
            self.host = clock + WAKE

    def launch(self, work: Callable[[], object], seconds: float, kernel: bool = True) -> None:
        """Put work into the current stream, or into the graph that is captured."""
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
            self.append(work, seconds / 2)  # no gaps between kernels

    # which stream owns a piece of memory, and which others use it
    def made(self, raw: torch.Tensor) -> None:
        owner = {"by": self.current, "used": set(), "noted": set()}
        self.owners[raw.untyped_storage().data_ptr()] = owner
        self.lost.append(owner)

    def use(self, raw: torch.Tensor, how: str = "used") -> None:
        owner = self.owners.get(raw.untyped_storage().data_ptr())
        if owner is not None and owner["by"] is not self.current:
            owner[how].add(self.current)

    def unnoted(self) -> int:
        """How many pieces of memory another stream used, which `record_stream` never said."""
        return sum(bool(owner["used"] - owner["noted"]) for owner in self.lost)

    # what torch asks of the module of a device
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
    """A tensor on the toy; its numbers, once they are there, are in `raw`."""

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
    def data(self, other: "ToyTensor") -> None:  # so does module.half()
        torch.Tensor.data.__set__(self, other)
        self.raw = other.raw

    def numpy(self, **_: object):
        raise TypeError("can't convert toy:0 device type tensor to numpy. Use Tensor.cpu()")

    def record_stream(self, stream: ToyStream) -> None:
        with stream:
            torch.toy.use(self.raw, "noted")

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run_on_toy(func, args, kwargs or {})


def raw(tree: object) -> object:
    """The same arguments, with the toy's tensors replaced by their numbers."""
    return tree_map(lambda leaf: leaf.raw if isinstance(leaf, ToyTensor) else leaf, tree)


def run_on_toy(func, args: tuple, kwargs: dict):
    """One operator with a tensor of the toy among its arguments."""
    toy, name = torch.toy, str(func).removeprefix("aten.").split(".")[0]
    target = kwargs.get("device")
    away = target is not None and torch.device(target).type == "cpu"
    if func is aten.copy_.default or (func is aten._to_copy.default and away):
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
    # done now for the shape, with whatever numbers are there, and again when its turn comes
    if func is aten.embedding.default:  # numbers that are not there yet may be no row
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
        toy.made(place)
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
    """Between host and toy, or within the toy."""
    toy, patient = torch.toy, True
    if func is aten.copy_.default:
        target, source = args[:2]
        patient = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    else:
        source, dtype = args[0], kwargs.get("dtype") or args[0].dtype
        target = torch.zeros(source.shape, dtype=dtype)
        patient = not kwargs.get("non_blocking", False)
    for tensor in (target, source):
        if isinstance(tensor, ToyTensor):
            toy.use(tensor.raw)
    seconds = COPY + source.nbytes / COPY_RATE
    there, here = raw(target), raw(source).detach()
    if isinstance(target, ToyTensor) and isinstance(source, ToyTensor):
        toy.launch(lambda: there.copy_(here), KERNEL + 2 * source.nbytes / KERNEL_RATE)
    elif isinstance(source, ToyTensor):
        toy.launch(lambda: there.copy_(here), seconds, kernel=False)
        if patient:
            toy.wait("copy to the host", toy.current)
    else:
        if not here.is_pinned():
            here, patient = here.clone(), source.dim() > 0  # the driver copies it first
        toy.launch(lambda: there.copy_(here), seconds, kernel=False)
        toy.copies.append(toy.current)
        if patient:
            toy.wait("copy to the device", toy.current)
    return target


def install_toy() -> None:
    """Make the toy an accelerator of torch, and the current one."""

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
            torch.toy.made(tensor)
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

    def copy_from(source, target, non_blocking=False):  # torch.tensor(…, device="toy") calls it
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
        if threading.current_thread() is threading.main_thread():  # not the loader's thread
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
    device.libraries = library, others  # they last as long as something holds them


if not (torch.cuda.is_available() or torch.xpu.is_available() or hasattr(torch, "toy")):
    install_toy()
TOY = getattr(torch, "toy", None)  # or None: there is a GPU


# %% [markdown]
# ## The truth: the script on the CPU
#
# A model reads signals of 12 points with 8 channels and says which of 10 frequencies made them.
# One sample in six has no label (−1) and does not count. The script is the kind that everybody
# writes first: it boots the loader in the same process, asks for the loss in every step, and
# picks the labelled rows with a mask. Its losses are the truth for all that follows.

# %%
LENGTH, CHANNELS, WIDTH, CLASSES = 12, 8, 32, 10
SAMPLES, BATCH, EPOCHS, RATE = 192, 16, 3, 0.01


class Signals(Dataset):
    """x [s, channels] and a label, or -1 where nobody knows it."""

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
        """Mean and standard deviation of each channel."""
        return self.x.mean((0, 1)), self.x.std((0, 1))


class CpuNet(nn.Module):
    """Signals [b, s, channels] to logits [b, classes]."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor):
        super().__init__()
        self.keep(mean, std)
        self.embed, self.place = nn.Linear(CHANNELS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def keep(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.mean, self.std = mean, std

    def places(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed((x - self.mean) / self.std) + self.place(self.places(x))  # [b, s, h]
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return self.head(h.mean(1))


def rate(epoch: int) -> float:
    """The learning rate: it halves with each epoch."""
    return RATE / 2**epoch


def order(data: Dataset) -> RandomSampler:
    """The order of samples, with a generator of its own: the same whoever loads them."""
    return RandomSampler(data, generator=torch.Generator().manual_seed(1))


def cpu_script() -> list[tuple[float, float]]:
    """Mean loss and accuracy of each epoch."""
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


if __name__ == "__main__":
    TRUTH = cpu_script()
    print("the truth, on the CPU: " + ", ".join(f"{loss:.4f}" for loss, _ in TRUTH))

# %% [markdown]
# ## Step 1: to the device
#
# `torch.accelerator` speaks of whatever accelerator this PyTorch was built for: NVIDIA's,
# AMD's, Intel's, Apple's. Two questions are easily confused: `current_accelerator()` names the
# kind it was *built* for, and gives `cuda` on a machine without a GPU; `is_available()` says
# whether there is one to use.
#
# Then everything that meets in one operator has to be on one device. `module.to(device)` moves
# parameters and **buffers**, not tensors that are plain attributes. A tensor that is made in
# `forward` is made on the CPU, unless you say `device=`; made there and moved, it costs a copy,
# and a wait, in every step. And an optimizer holds the parameters it was given: if the model
# gets new ones when it moves, as it may, it updates tensors that nobody uses any more. Move
# first, then make the optimizer.
#
# Let `Net` keep mean and standard deviation as what they are, constants that belong to the
# model: they move with it and are saved with it, but nobody trains them.


# %%
def pick_device() -> torch.device:
    """The accelerator if there is one to use, otherwise the CPU."""
    # >>> solution 1: ask is_available first, then current_accelerator
    if torch.accelerator.is_available():
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")
    # <<< solution


class Net(CpuNet):
    """The same model for any device."""

    def keep(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        # >>> solution 1: keep mean and std so that they move with the module
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        # <<< solution

    def places(self, x: torch.Tensor) -> torch.Tensor:
        # >>> solution 1: the numbers from 0 to s - 1, made where x is
        return torch.arange(x.shape[1], device=x.device)
        # <<< solution


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model on the device and AdamW for it; the same first weights everywhere."""
    torch.manual_seed(0)
    model = Net(*Signals().moments())
    # >>> solution 1: move the model, make torch.optim.AdamW with lr=RATE, return both
    model.to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)
    # <<< solution


# %%
def batches(count: int = SAMPLES // BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first batches, in the order of the data, on the CPU."""
    data = Signals()
    return [(data.x[i : i + BATCH], data.y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)][
        :count
    ]


def moved(count: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same on the device."""
    return [(x.to(device), y.to(device)) for x, y in batches(count)]


if __name__ == "__main__":
    DEVICE = pick_device()

    def check_device() -> None:
        model, optimizer = build(DEVICE)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ask(held == {id(p) for p in model.parameters()}, "the optimizer holds other parameters")
        if TOY:
            ask(DEVICE.type == "toy", f"there is an accelerator, and pick_device says {DEVICE}")
        where = next(model.parameters()).device.type
        ask(where == DEVICE.type, f"the parameters are on {where}")
        ask("mean" in dict(model.named_buffers()), "mean is not a buffer")
        ask("mean" in model.state_dict(), "mean is not saved with the model")
        x = moved(1, DEVICE)[0][0]
        if TOY:
            TOY.start_counting()
        logits = model(x)
        waits = sum(TOY.waits.values()) if TOY else 0
        ask(waits == 0, f"the host waited in forward: {waits}")
        torch.manual_seed(0)
        truth = CpuNet(*Signals().moments())(x.cpu())
        torch.testing.assert_close(
            logits.cpu(), truth, rtol=1e-3, atol=1e-4, msg="wrong logits"
        )
        print(f"step 1: the model is on {DEVICE.type}, its logits are those of the CPU")

    check_device()

# %% [markdown]
# ## Step 2: a copy that nobody waits for
#
# From ordinary memory a copy to the device makes the host wait: the driver has to be sure of
# the pages, and takes the bytes through a buffer of its own. From **pinned** memory the
# device's copy engine reads by itself, and with `non_blocking=True` the call returns at once.
# Pinning costs more than a copy, so one pins a few buffers once and uses them in turn.
#
# Now the source must be left alone until the copy is done, and nothing in PyTorch checks it.
# Fill the buffer with the next batch too early, and the device gets that one, twice. So behind
# each copy goes an **event**, a mark in the stream, and before a buffer is filled again the
# host waits for the mark of *its* copy: with `slots` buffers that copy was launched `slots`
# batches ago, and most often is long done.


# %%
class Sender:
    """Sends batches to the device through a ring of pinned buffers."""

    def __init__(self, like: torch.Tensor, slots: int, device: torch.device):
        self.device, self.slots, self.count = device, slots, 0
        # >>> solution 2: self.buffers, pinned, one like `like` for each slot; self.events
        # hint: tensor.pin_memory() gives a pinned copy
        self.buffers = [torch.empty_like(like).pin_memory() for _ in range(slots)]
        self.events = [None] * slots
        # <<< solution

    def send(self, batch: torch.Tensor) -> torch.Tensor:
        """The batch, a CPU tensor, as it will be on the device."""
        slot = self.count % self.slots
        self.count += 1
        # >>> solution 2: wait until the slot's last copy is done; fill; copy; record an event
        # hint: torch.Event(self.device), its record() and synchronize()
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
            ask(torch.equal(a.cpu(), b), f"batch {i} arrived wrong")
        allowed = len(plain) - 3
        ask(set(waits) <= {"event"}, f"the host waited: {waits}")
        events = waits.get("event", 0)
        ask(events <= allowed, f"{events} waits, {allowed} would do")
        pins = TOY.pins if TOY else 0
        ask(pins == 0, f"memory was pinned {pins} times while sending")
        print(
            f"step 2: {len(plain)} batches sent through 3 buffers, {allowed} waits for an event"
        )

    if DEVICE.type != "cpu":
        check_sender()

# %% [markdown]
# ## Step 3: a loader that keeps up
#
# Without workers, `DataLoader` reads the next batch in your process, when the loop asks for it,
# and the device has nothing to do meanwhile. With `num_workers` processes, batches are read
# while you train; if reading one takes $r$ seconds and a step $t$, it takes $r/t$ workers to
# keep up. By default workers end with each epoch, and the first batch of the next waits for new
# processes, which on some systems import torch again: `persistent_workers=True` keeps them
# (it is refused without workers). `pin_memory=True` lets a thread put each batch into pinned
# memory: useful where there is an accelerator, a warning where there is none.
#
# The order of samples must not depend on the number of workers. It comes from
# `order(dataset)`: pass it as `sampler`.


# %%
def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    """Batches of BATCH in the order of the CPU script, ready to be copied to the device."""
    # >>> solution 3: a DataLoader with sampler, workers that stay, pinned where it helps
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
class WhoReads(Dataset):
    """Samples of the number of the process that reads them, and their own."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([os.getpid(), i])


if __name__ == "__main__":

    def check_loader() -> None:
        loader = make_loader(WhoReads(), 2, DEVICE)
        epochs = [list(loader) for _ in range(2)]
        readers = [{int(pid) for batch in epoch for pid in batch[:, 0]} for epoch in epochs]
        ask(os.getpid() not in readers[0], "your own process reads the samples")
        ask(readers[0] == readers[1], "the workers of the second epoch are new ones")
        ask(len(readers[0]) == 2, f"{len(readers[0])} workers, 2 were asked for")
        pinned = [batch.is_pinned() for batch in epochs[0]]
        ask(set(pinned) == {DEVICE.type != "cpu"}, "batches are pinned where it does not help")
        plain = DataLoader(WhoReads(), BATCH, sampler=order(WhoReads()))
        truth = [[batch[:, 1].tolist() for batch in plain] for _ in range(2)]
        found = [[batch[:, 1].tolist() for batch in epoch] for epoch in epochs]
        ask(found == truth, "the samples come in another order")
        plain = make_loader(WhoReads(), 0, torch.device("cpu"))
        ask(not plain.pin_memory, "batches for the CPU are pinned")
        print("step 3: 2 workers read both epochs, in the order of the CPU script")

    check_loader()

# %% [markdown]
# ## Step 4: the next batch crosses while this one computes
#
# Copies and kernels in *one* stream take turns. In a stream of its own, a copy runs beside the
# kernels: the copy engine is a separate unit. So while the model works on batch $i$, batch
# $i + 1$ crosses. Four things make it right:
#
# * Copies are launched within `with copies:`, and an event is recorded there behind them.
# * Before a batch is used, the *compute* stream waits for that event, `compute.wait_event`. The
#   host does not wait.
# * The copy of the next batch is launched *before* this batch is handed over, for the loop
#   comes back only after it has launched its whole step.
# * The memory of the batch belongs to the stream in which it was made. When the loop lets go of
#   it, the allocator may give it to the next copy at once, while kernels still read it.
#   `tensor.record_stream(compute)` tells the allocator to wait for them.
#
# The sources are pinned tensors of the loader. PyTorch's own pinned memory is not reused before
# its copies are done; the buffers of step 2, which you fill yourself, are your own affair.


# %%
def prefetch(
    source: Iterable[tuple[torch.Tensor, ...]], device: torch.device
) -> Iterator[tuple[torch.Tensor, ...]]:
    """The batches of `source`, pinned, on the device, each copied one step ahead."""
    copies = torch.Stream(device=device)
    compute = torch.accelerator.current_stream(device)

    def start(batch: tuple[torch.Tensor, ...]) -> tuple[list[torch.Tensor], torch.Event]:
        """Launch the copies of one batch; return what arrives and the mark behind it."""
        # >>> solution 4: in the stream of copies: copy without waiting, record an event
        arrived = torch.Event(device)
        with copies:
            there = [tensor.to(device, non_blocking=True) for tensor in batch]
            arrived.record(copies)
        return there, arrived
        # <<< solution

    def hand_over(there: list[torch.Tensor], arrived: torch.Event) -> tuple[torch.Tensor, ...]:
        """Order what comes behind the arrival; return the tensors."""
        # >>> solution 4: compute waits for the event, and the allocator knows of compute
        compute.wait_event(arrived)
        for tensor in there:
            tensor.record_stream(compute)
        return tuple(there)
        # <<< solution

    # >>> solution 4: start each batch before the one before it is yielded; do not lose the last
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
            for _ in range(20):  # the step
                result = (x @ there).relu().sum() + y.sum()
            sums.append(result)
        if TOY:
            ask(not TOY.waits, f"the host waited: {dict(TOY.waits)}")
            ask(copied[0] == 2, f"{copied[0]} batches copied when the first came, not 2")
            ask(not TOY.unnoted(), "memory of the copies' stream is used, and not recorded")
            ask(TOY.current not in TOY.copies, "copies are in the stream of the kernels")
        ask(len(sums) == len(source), f"{len(sums)} batches came of {len(source)}")
        ask(not list(prefetch([], DEVICE)), "a source without batches gave some")
        for i, (x, y) in enumerate(source):
            right = (x @ weight).relu().sum() + y.sum()
            close = torch.allclose(sums[i].cpu(), right, rtol=1e-4)
            ask(close, f"batch {i} was used before it was there")
        print(f"step 4: {len(sums)} batches, one step ahead, no wait of the host")

    if DEVICE.type != "cpu":
        check_prefetch()

# %% [markdown]
# ## Step 5: a loop that asks for nothing
#
# While the host only launches, it runs ahead, and the device always has work in its queue. A
# number that Python has to see ends that: the host waits until the queue is empty, and then
# the device waits until the host has launched again. Everything of this kind does it:
# `.item()`, `float(t)`, `print(t)`, `if loss.isnan()`, `.cpu()`, and any tensor whose *shape*
# depends on data, such as `logits[known]`: how many rows are there?
#
# * What is not labelled needs no mask: `F.cross_entropy` has `ignore_index`. A count is a sum
#   of true values.
# * Losses and counts add up in tensors on the device; you ask once, when the epoch ends. Detach
#   what you keep, or it keeps the graph of its step in memory.
# * A mean over the epoch weighs each batch by the number of its labelled samples.
# * Is the loss not a number? Ask at the end too: it stays NaN.


# %%
def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[float, float]:
    """Train on the batches, which are on the device; return mean loss and accuracy."""
    # >>> solution 5: the loop of cpu_script, and the host waits once, at the end
    # hint: F.cross_entropy(..., ignore_index=-1); a tensor of sums; sums.tolist()
    sums = None  # of losses, right answers, labelled samples
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
def chatty_epoch(model, optimizer, source) -> tuple[float, float]:
    """The CPU script's loop, on a device."""
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
        source = moved(12, DEVICE)
        if TOY:
            TOY.start_counting()
        loss, accuracy = train_epoch(model, optimizer, source)
        waits = dict(TOY.waits) if TOY else {}
        ask(sum(waits.values()) <= 4, f"the host waited: {waits}")
        model, optimizer = build(torch.device("cpu"))
        truth = chatty_epoch(model, optimizer, batches())
        close = abs(loss - truth[0]) < (1e-4 if TOY else 1e-2)
        close = close and abs(accuracy - truth[1]) < 0.02
        ask(close, f"loss and accuracy are {loss, accuracy}, on the CPU {truth}")
        print("step 5: loss and accuracy of an epoch are those of the CPU")
        if TOY:
            print(f"        waits of the host in 12 steps: {sum(waits.values())}")

    check_loop()

# %% [markdown]
# ## Step 6: 16 bits where they do no harm
#
# Under `torch.autocast(device.type, dtype=torch.bfloat16)` matrix products run in bf16, which
# tensor cores do several times faster than fp32; norms, softmax and most losses run in fp32.
# The parameters stay fp32: it is each operator that casts its inputs, so the model itself is
# *not* converted. Name the type of the device at hand: autocast for another type does nothing.
#
# * Forward and loss belong inside, backward outside: each backward operator takes the dtype
#   that its forward had.
# * What comes out of the last linear layer is bf16. `F.cross_entropy` under autocast returns
#   fp32, on CUDA of a log-softmax in bf16 unless you take `logits.float()`; outside, bf16.
# * Sums over an epoch stay in fp32. In bf16, with 8 bits of precision, counting one by one ends
#   at 256: 256 + 1 is 256.
#
# The step adds to `sums`, in place, the sum of the losses, of the right answers and of the
# labelled samples, as in step 5. That it works on memory that stays will pay off in step 7.


# %%
def new_sums(device: torch.device) -> torch.Tensor:
    """Sums of losses, right answers and labelled samples of an epoch, all 0."""
    # >>> solution 6: three zeros on the device, of a dtype that can add
    return torch.zeros(3, device=device)
    # <<< solution


def mixed_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    y: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """One step in mixed precision; adds to `sums`. The host never waits."""
    # >>> solution 6: forward and loss under autocast; backward, step; add to sums in place
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
        source, sums = moved(12, DEVICE), new_sums(DEVICE)
        wide = sums.dtype in (torch.float32, torch.float64)
        ask(wide, f"the sums are {sums.dtype}")
        for x, y in source:
            mixed_step(model, optimizer, x, y, sums)
        ask({dtype for _, dtype in seen} == {torch.bfloat16}, f"products are {seen[0][1]}")
        kept = {p.dtype for p in model.parameters()}
        ask(kept == {torch.float32}, f"parameters are {kept}")
        total, _, count = sums.tolist()
        ask(count > 0, "the sums are still 0")
        truth = train_epoch(*build(DEVICE), source)
        off = abs(total / count - truth[0]) / truth[0]
        ask(off < 0.03, f"the loss is {total / count:.4f}, in fp32 {truth[0]:.4f}")
        ask(count == sum(int((y >= 0).sum()) for _, y in source), f"{count} labelled samples")
        print(
            f"step 6: products in bf16, parameters and sums in fp32, loss ≈{total / count:.3f}"
        )

    check_mixed()

# %% [markdown]
# ## Step 7: fewer launches
#
# A step of this model is some 130 operators, each of which the host has to launch, and each
# does next to nothing. Two remedies:
#
# **Larger kernels.** The optimizer's update is a dozen operators for every parameter.
# `fused=True` does it for all of them in one or two.
#
# **A graph.** While a stream is *captured*, nothing runs: what is launched is written down,
# with the addresses it works on. `replay()` launches all of it at once. What follows:
#
# * Inputs must come at the same address: copy each batch *into* the tensors of the capture,
#   your own, not the caller's. A new tensor under the old name is not seen.
# * Capturing ran nothing: replay for that batch, too.
# * What happens once (an optimizer making its states) must happen before: run a few steps
#   plainly first. They may be real ones. A state made while capturing would be made, zero,
#   in every replay.
# * What is a number in Python is frozen: a learning rate must be a tensor on the device, and
#   `set_rate` writes into it. An optimizer that may be captured says `capturable=True`.
#
# (`torch.compile` makes larger kernels of forward and backward, and with
# `mode="reduce-overhead"` such graphs; the chapter "Memory and performance" has it.)


# %%
def new_graph(device: torch.device) -> tuple[object, Callable]:
    """An empty graph, and what makes `with capture(graph):` on this device."""
    if device.type == "toy":
        return ToyGraph(), ToyGraph.capture
    if device.type == "cuda":  # NVIDIA's and AMD's; the loader's thread may pin meanwhile
        capture = functools.partial(torch.cuda.graph, capture_error_mode="thread_local")
        return torch.cuda.CUDAGraph(), capture
    module = torch.get_device_module(device)
    return module.XPUGraph(), module.graph


class ToyGraph:
    """The toy's graph: a list of work."""

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
    """AdamW in few kernels, that can be captured, with a rate that can be changed."""
    device = next(model.parameters()).device
    # >>> solution 7: AdamW, fused and capturable, its lr the tensor of RATE on the device
    rate = torch.tensor(RATE, device=device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True, capturable=True)
    # <<< solution


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Change the learning rate, also of a step that was captured."""
    # >>> solution 7: write into the tensor that the optimizer has
    for group in optimizer.param_groups:
        group["lr"].fill_(value)
    # <<< solution


class Replayed:
    """`step(x, y)` run plainly `warm` times, then captured, then replayed."""

    def __init__(self, step: Callable[[torch.Tensor, torch.Tensor], None], warm: int = 2):
        self.step, self.warm, self.graph = step, warm, None

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        # >>> solution 7: `warm` calls plainly; then capture once on own tensors; copy, replay
        # hint: self.graph, capture = new_graph(x.device), then with capture(self.graph):
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
    """An epoch of fused and replayed mixed steps: (source, rate) to the mean loss."""
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
    def epoch(source: Iterable, rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = rate
        return train(model, optimizer, source)[0]

    return epoch


def mixed_epoch(model, optimizer, source) -> tuple[float, float]:
    sums = new_sums(next(model.parameters()).device)
    for x, y in source:
        mixed_step(model, optimizer, x, y, sums)
    total, right, count = sums.tolist()
    return total / count, right / count


if __name__ == "__main__":

    def check_replay() -> None:
        source, results = moved(12, DEVICE), []
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
            ask(right, f"epoch {number}: loss {a:.4f}, without a graph {b:.4f}")
        ask(not TOY or launches < plain / 10, f"{launches / 12:.0f} launches a replayed step")
        (group,) = fast_optimizer(build(DEVICE)[0]).param_groups
        ask(group["fused"] and group["capturable"], "AdamW is not fused, or not capturable")
        print("step 7: replayed steps have the losses of plain ones")
        if TOY:
            print(f"        {plain / 12:.0f} launches a step plainly, {launches / 12:.0f} now")

    if DEVICE.type != "cpu":
        check_replay()

# %% [markdown]
# ## Step 8: measure it rightly, then name what is slow
#
# <!-- not of the glossary: hot spot -->
#
# Because launching returns at once, a clock around a step measures how fast Python is. Rightly:
#
# * The first steps are different (allocations, choice of kernels, compilation): leave out
#   `warm` of them.
# * Before a clock is read, the device must be done: `torch.accelerator.synchronize()`, before
#   the start too, or you measure what was queued earlier.
# * Report the median: one step in many is slow for reasons that are not yours.
#
# Such waits belong into a measurement, and nowhere else. `clock` is `time.perf_counter`, or the
# toy's own clock.
#
# A clock says how long, and a **profile** says where. `torch.profiler` notes every operator
# with its start, its duration and, by `record_shapes=True`, the shapes of its inputs. A
# `schedule` keeps the first steps out of it; `profiler.step()` tells it that a step is over. It
# writes a list of events, `traceEvents`, in JSON, which [Perfetto](https://ui.perfetto.dev)
# draws. They look like this (times in µs, and some more keys):
#
#     {"cat": "user_annotation", "name": "ProfilerStep#3", "tid": 1, "ts": 80.0, "dur": 90.0}
#     {"cat": "cpu_op", "name": "aten::matmul", "tid": 1, "ts": 90.5, "dur": 40.0,
#      "args": {"Input Dims": [[9, 9], [9, 2]]}}
#     {"cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 92.0, "dur": 36.5,
#      "args": {"Input Dims": [[9, 9], [9, 2]]}}
#
# What lies within another event of the same thread, `tid`, was called by it: `matmul` calls
# `mm`. Sorted by *total* time, wrappers come first, for `matmul` has all of `mm`'s. An
# operator's **own time**, *self* in the profiler's table, is its duration less that of the
# operators which it calls itself, not of those that these call. And one name at two shapes is
# two things: the model's backward has products, too. So a row of the table is a name with its
# shapes.
#
# `slow_step` trains on raw signals of 512 points, which somebody smooths first: there is the
# hot spot. Profile the step, read the trace, and name the operator that does the work.
#
# On a GPU the trace has the kernels as well, as events whose `cat`, category, is `kernel`; the
# time of an operator is that of launching it. Go on with Nsight Systems, which also sees the
# driver, the operating system and all ranks:
#
#     nsys profile --trace=cuda,nvtx,osrt --output=step python my_labs/lab07_pytorch_gpu.py
#     nsys stats --report cuda_gpu_kern_sum,cuda_api_sum step.nsys-rep
#
# Nothing here runs it: it is a program of NVIDIA's for NVIDIA's GPUs, and not a Python package.


# %%
def measure(
    work: Callable[[], object], clock: Callable[[], float], warm: int = 3, repeats: int = 7
) -> float:
    """The median of the seconds that `work()` takes, until the device has done it."""
    # >>> solution 8: the median time of `repeats` calls, after `warm` calls without a clock
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
    """An operator with one kind of inputs, for a step."""

    name: str
    shapes: list  # of its inputs, as the trace has them
    calls: float
    own: float  # µs


def record(step: Callable[[], object], path: str | Path, warm: int = 2, count: int = 2) -> None:
    """Write the trace of `count` calls of `step`, after `warm` others, with shapes."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    # >>> solution 8: profile with a schedule and shapes; step() and profiler.step(); export
    # hint: schedule(wait=0, warmup=…, active=…, repeat=1), profiler.export_chrome_trace
    plan = schedule(wait=0, warmup=warm, active=count, repeat=1)
    with profile(activities=activities, schedule=plan, record_shapes=True) as profiler:
        for _ in range(warm + count):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
    # <<< solution


def read_trace(path: str | Path) -> list[Row]:
    """The operators in a trace by name and shapes, for a step; most own time first."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    # >>> solution 8: who lies in whom, in each thread; own times; add up, divide by the steps
    # hint: in the order of starts (at one start the longer first) they nest like brackets
    steps = sum(name.startswith("ProfilerStep") for name in {e.get("name", "") for e in events})
    calls, own, open_in = collections.Counter(), collections.Counter(), {}
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        key = event["name"], json.dumps(event["args"].get("Input Dims", []))
        around = open_in.setdefault(event["tid"], [])  # the innermost is the last
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
MEANS = NEAR / NEAR.sum(1, keepdim=True)  # [points, points]: of a point and those beside it


def smooth_by_sample(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """[b, points, channels], smoothed."""
    return torch.stack([means @ sample for sample in x])


def smooth_at_once(x: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    """The same by one operator, which reads each point three times and not 512."""
    smooth = F.avg_pool1d(x.transpose(1, 2), 3, 1, padding=1, count_include_pad=False)
    return smooth.transpose(1, 2)


def slow_step(device: torch.device, smooth: Callable = smooth_by_sample) -> Callable[[], None]:
    """A step of training on raw signals, of which the model gets every 43rd point."""
    model, optimizer = build(device)
    _, y = moved(1, device)[0]
    x = torch.randn(BATCH, POINTS, CHANNELS, generator=torch.Generator().manual_seed(8))
    x, means = x.to(device), MEANS.to(device)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(smooth(x, means)[:, :: POINTS // LENGTH + 1])
        F.cross_entropy(logits, y, ignore_index=-1).backward()
        optimizer.step()

    return step


def hot_spot() -> tuple[str, list, int]:
    """Of slow_step's hot spot the operator, the shapes of its inputs, its calls in a step."""
    # >>> solution 8: name, shapes and calls, as your table on the CPU has them first
    # hint: record(slow_step(torch.device("cpu")), path), then read_trace(path); needs step 1
    return "aten::mm", [[POINTS, POINTS], [POINTS, CHANNELS]], BATCH
    # <<< solution


# %%
if __name__ == "__main__":

    def check_measure() -> None:
        clock = TOY.now if TOY else time.perf_counter
        model, optimizer = build(DEVICE)
        source = moved(1, DEVICE)
        seconds = measure(lambda: train_epoch(model, optimizer, source), clock)
        ask(seconds > 0, "no time passed")
        x, calls = torch.ones(1 << 16, device=DEVICE), []

        def many() -> None:  # slow at first, and once more
            calls.append(1)
            if TOY and (len(calls) <= 3 or len(calls) == 6):
                TOY.host += 0.01
            for _ in range(20):
                x.add_(1)

        whole = measure(many, clock)
        if TOY:
            kernel = KERNEL + x.nbytes / KERNEL_RATE
            right = LAUNCH + 20 * kernel + WAKE
            text = f"20 kernels of {1e6 * kernel:.1f} µs: {1e6 * whole:.0f} µs"
            ask(abs(whole - right) < 1e-6, f"{text}, not {1e6 * right:.0f} µs")
            print(f"step 8: {text} in all")
        else:
            print(f"step 8: a step takes ≈{1e3 * seconds:.2f} ms")

    def check_profile() -> None:
        device = torch.device("cpu") if TOY else DEVICE  # the toy's operators are the CPU's
        for smooth in (smooth_by_sample, smooth_at_once):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")  # for Perfetto, keep one
                record(slow_step(device, smooth), path)
                rows = read_trace(path)
            whole = sum(row.own for row in rows)
            ask(min(row.own for row in rows) >= 0, "an operator has less than no own time")
            print(f"        {smooth.__name__}: ≈{whole / 1e3:.2f} ms a step in operators")
            if smooth is smooth_at_once:
                continue
            try:
                name, shapes, calls = hot_spot()
            except NotImplementedError:
                print(*rows[:3], sep="\n")
                raise
            found = [row for row in rows if (row.name, row.shapes) == (name, shapes)]
            ask(len(found) == 1, f"the trace has no {name} of {shapes}")
            ask(found[0].calls == calls, f"{found[0].calls} calls of {name}, not {calls}")
            share = 100 * found[0].own / whole
            print(f"        {calls} calls of {name} {shapes} are ≈{share:.0f}% of it")

    if DEVICE.type != "cpu":
        check_measure()
        check_profile()

# %% [markdown]
# ## All of it
#
# The last cell trains three epochs in five ways, each with the loader of step 3 and with the
# copies of its batches, and puts them side by side: the losses, and of the last epoch the
# launches, the waits, the time on the toy's clock, and the share of it in which the device
# computed. Each way adds to the one before.
#
# Look at what each buys. Without waits and with prefetching, the device computes nearly all the
# time: it is busy. Busy is not fast: autocast *costs* time on the toy, whose products are not
# faster in bf16, for every cast is one more kernel. (On a GPU it pays when the products are
# large.) And the largest step is the last, which does the same arithmetic in fewer launches,
# because this model is small. A GPU counts nothing, so only times are printed there, behind ≈.
# On an H200 (measured once, without a transcript) the last way took 17 ms, the others 39 to 47.


# %%
def moving(source: Iterable, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Each batch copied when it is asked for."""
    for batch in source:
        yield [tensor.to(device) for tensor in batch]


if __name__ == "__main__":

    def ladder() -> None:
        data, clock = Signals(), TOY.now if TOY else time.perf_counter
        loader = make_loader(data, 2, DEVICE)
        ways = [
            ("moved", moving, lambda: plain_epochs(*build(DEVICE), chatty_epoch)),
            ("no waits", moving, lambda: plain_epochs(*build(DEVICE), train_epoch)),
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
            for (truth, _), loss in zip(TRUTH, losses, strict=True):
                ask(abs(loss - truth) < 0.05 * truth, f"{name}: {losses}, the CPU had {TRUTH}")
            about = "≈" if name in ("autocast", "replayed") else ""  # bf16 rounds as it likes
            line = f"{name:11} " + " ".join(f"{about + format(v, '.4f'):>7}" for v in losses)
            if TOY:
                waits = sum(TOY.waits.values()) - 2  # without the two of the clock
                busy = TOY.busy / seconds
                line += f" {TOY.launches:11,} {waits:6}  {1e3 * seconds:11.2f}  {busy:11.0%}"
            else:
                line += f"                    ≈{1e3 * seconds:10.2f}"
            print(line)
        print("five ways, the losses of the CPU")

    if DEVICE.type != "cpu":
        ladder()
