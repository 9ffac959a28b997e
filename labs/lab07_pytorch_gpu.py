# %% [markdown]
# # Lab 07: a training script on the GPU, kept busy
#
# A script that trains on the CPU runs on a GPU after three lines are changed, and then the GPU
# is often idle most of the time: it waits for a batch, for a copy, for Python, or stands still
# because the host asked for a number. In this lab you take such a script, move it, and remove
# one wait after another, while the losses stay those of the CPU.
#
#     python labs/lab07_pytorch_gpu.py
#
# runs the finished lab on your GPU. Without a GPU it brings a device of its own, `toy`, to which
# tensors really move; it is as asynchronous as a device may be, so that every mistake shows.
# (`CUDA_VISIBLE_DEVICES= python …` gives you the toy where there is a GPU, too.) To do it
# yourself:
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
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils._pytree import tree_leaves, tree_map


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """End on a blank or on a failed check with one sentence."""
    if not issubclass(kind, (NotImplementedError, AssertionError)):
        return sys.__excepthook__(kind, error, trace)
    blank = issubclass(kind, NotImplementedError)
    lines = [n for f, n in traceback.walk_tb(trace) if f.f_code.co_filename == __file__]
    line = lines[-1 if blank else min(1, len(lines) - 1)]  # the blank, or the line of a check
    what = "a blank" if blank else "a check that failed"
    print(f"{Path(__file__).name}, line {line}, {what}: {error}", flush=True)
    sys.exit(1)


def ask(right: bool, otherwise: str) -> None:
    """A check: say what is wrong."""
    if not right:
        raise AssertionError(otherwise)


if __name__ == "__main__":
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The toy: a device that puts everything off
#
# You may skip the code of the next cell, but not this text. An operator called on a GPU's tensor
# only goes into a queue, a **stream**, and the call returns; the device does it later. How much
# later, nobody promises. The toy does it as late as a device may: *not before somebody waits*.
# Then it works off the queue up to what was waited for. So a program that is right only because
# the device was quick is wrong here, every time. (Memory that nothing has been written to reads
# as zero; on a GPU it reads as anything.)
#
# * Its tensors have `device="toy"`. `torch.accelerator`, `torch.Stream`, `torch.Event`,
#   `pin_memory`, `record_stream`, `autocast` and the fused optimizers work with it.
# * It counts launches, copies, and each time the host waits, with the reason: `torch.toy.waits`.
# * A copy from **pinned** memory with `non_blocking=True` reads its source when the queue comes
#   to it. Any other copy makes the host wait.
# * It keeps a clock of its own: the host needs 6 µs to launch an operator, the device 4 µs for a
#   kernel and 1 µs for each 25 kB it touches, a copy 10 µs and 1 µs for each 2.5 kB, in another
#   engine than kernels if it is in another stream. These are numbers of a small model on a GPU,
#   rounded; they are the same in every run and on every machine.


# %%
aten = torch.ops.aten
LAUNCH, KERNEL, COPY, PIN = 6e-6, 4e-6, 10e-6, 100e-6  # seconds, of the host and of the device
KERNEL_RATE, COPY_RATE, HOST_RATE = 25e9, 2.5e9, 5e9  # bytes per second
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
        self.launches, self.pins, self.busy, self.began = 0, 0, 0.0, self.host
        self.waits: collections.Counter[str] = collections.Counter()
        self.names: list[str] = []  # operators, as they were launched
        self.copies: list[tuple[ToyStream, int]] = []  # those to the device: stream, launches
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
        self.host = max(self.host, stream.clock if clock is None else clock)
        stream.run(until)

    def synchronize(self, device: object = None) -> None:
        self.waits["synchronize"] += 1
        for stream in self.streams:
            stream.run()
            self.host = max(self.host, stream.clock)

    def launch(self, name: str, work: Callable[[], object], seconds: float) -> None:
        """Put work into the current stream, or into the graph that is captured."""
        self.host += LAUNCH
        self.names.append(name)
        self.launches += 1
        if self.graph is not None:
            self.graph.append((work, seconds))
        else:
            self.append(work, seconds)

    def append(self, work: Callable[[], object], seconds: float) -> None:
        self.current.queue.append(work)
        self.current.clock = max(self.current.clock, self.host) + seconds
        self.busy += seconds

    def replay(self, graph: list) -> None:
        self.host += LAUNCH
        self.launches += 1
        self.names.append("graph")
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
    if any(value.alias_info and not value.alias_info.is_write for value in returns):
        return tree_map(ToyTensor, func(*raw_args, **raw_kwargs))  # a view
    mask = func is aten.index.Tensor and any(
        index is not None and index.dtype is torch.bool for index in raw_args[1]
    )
    if mask or func in SHAPE_FROM_DATA:
        toy.wait("mask as an index" if mask else SHAPE_FROM_DATA[func], toy.current)
    traffic = sum(tensor.nbytes for tensor in tensors)
    if func._schema.is_mutable:
        cost = KERNEL + traffic / KERNEL_RATE
        toy.launch(name, lambda: func(*raw_args, **raw_kwargs), cost)
        named = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [
            named[argument.name]
            for argument in func._schema.arguments
            if argument.alias_info and argument.alias_info.is_write and argument.name in named
        ]
        return (written[0] if len(returns) == 1 else tuple(written)) if returns else None
    # done now for the shape, with whatever numbers are there, and again when its turn comes
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
    if "empty" not in name:
        toy.launch(name, work, KERNEL + traffic / KERNEL_RATE)
    return tree_map(lambda leaf: ToyTensor(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


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
        toy.launch("copy_", lambda: there.copy_(here), KERNEL + 2 * source.nbytes / KERNEL_RATE)
    elif isinstance(source, ToyTensor):
        toy.launch("to host", lambda: there.copy_(here), seconds)
        if patient:
            toy.wait("copy to the host", toy.current)
    else:
        if not here.is_pinned():
            here, patient = here.clone(), source.dim() > 0  # the driver copies it first
        toy.launch("to device", lambda: there.copy_(here), seconds)
        toy.copies.append((toy.current, toy.launches))
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

    def make(tensor: torch.Tensor) -> ToyTensor:
        torch.toy.made(tensor)
        return ToyTensor(tensor)

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
    for name, build in (
        ("empty.memory_format", torch.empty),
        ("empty_strided", torch.empty_strided),
        ("arange.start_step", torch.arange),
    ):
        library.impl(
            name,
            lambda *args, build=build, dtype=None, **_: make(build(*args, dtype=dtype).zero_())
            if build is not torch.arange
            else make(build(*args, dtype=dtype)),
            "PrivateUse1",
        )

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


if not torch.accelerator.is_available():
    install_toy()
TOY = getattr(torch, "toy", None)  # or None: there is a GPU


