# %% [markdown]
# # Lab 03: Shard a model with ZeRO and FSDP
#
# You get a model, the optimizer Adam, and a limit of 8.5 MiB of memory for each rank. DDP would
# replicate the model, and then every rank needs 13.7 MiB, for any number of ranks. Training
# stops with *out of memory*. In this lab you shard the model until it fits. First you shard the
# optimizer's states, then the gradients, and then the parameters. These are the stages 1, 2 and
# 3 of ZeRO, and you write them by hand. After that, FSDP2's `fully_shard` does all of this for
# you. You clip and accumulate sharded gradients. You save a checkpoint and load it on
# a different number of ranks. At the end you build a model that is never whole on any rank. In
# every step, the losses must equal the losses of one process, and the bytes must equal the
# formulas.
#
#     torchrun --nproc-per-node=4 labs/lab03_fsdp.py
#
# This command runs the finished lab with 1, 2, 3 or 4 ranks, on the CPU or with one GPU per
# process. With one rank nothing can be sharded, so nothing fits. The lab then prints only its
# results. To do the lab yourself:
#
#     python labs/start.py 03
#     torchrun --nproc-per-node=4 my_labs/lab03_fsdp.py
#     python labs/check.py my_labs/lab03_fsdp.py
#
# The first command writes your copy, with blanks, to `my_labs/`. The last command grades your
# copy step by step, with 1, 2 and 3 ranks. With `--step 2` it grades one step, and with
# `--output` it shows what failing ranks printed. Work in a clone of the repository and use its
# Python: `make test WHAT=labs` sets it up once, and `source .venv/bin/activate` puts torchrun
# on the path.
#
# The lab has eight steps. Each step has a text, one or more blanks for you to fill, and a check
# that prints what it tested. Your copy runs until it reaches the first blank, and it says in
# one line what you must write there. The long report below that line comes from torchrun. If
# your copy hangs, press Ctrl-C and run `check.py`: ranks that wait for each other print
# nothing. `check.py` uses finished versions of all earlier steps, so you can do the steps in
# any order. Allow four hours for the lab. Do lab 02 first. Chapter 04 derives what you write
# here. Read it up to "From scratch" before step 1, "Stage 3: parameters as guests" before step
# 4, and "For real: fully_shard" before step 5.

# %%
import math
import os
import shutil
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def say(text: str) -> None:
    """Print on rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def stop_kindly(kind: type[BaseException], error: BaseException, trace) -> None:
    """Print one sentence on one rank if the lab ends at a blank or at a failed check."""
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
        sys.exit("start me with: torchrun --nproc-per-node=4 lab03_fsdp.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # rank 0 prints the sentence; torchrun then ends the other ranks
        sys.exit("24 rows and 96 columns are cut into equal parts: start 1, 2, 3 or 4 ranks")
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls your functions and classes, so put your own test code inside functions or
# such cells.
#
# ## The reference: one process with the whole model
#
# The model has fourteen units: a linear layer for the input, twelve residual blocks, and a
# linear layer for the output. It has $\Psi$ = 897,540 parameters in float32. One process trains
# it with Adam on four batches of 24 rows. Every sharded version must reproduce the losses of
# this process. A second run clips the norm of the gradient to 0.1. You need the second run in
# step 6.

# %%
WIDTH, HIDDEN, BLOCKS = 36, 96, 12
BATCH, BATCHES, MICRO_BATCHES = 24, 4, 2
LEARNING_RATE, CLIP = 1e-3, 0.1
LIMIT = 17 * 2**19  # bytes for each rank: 8.5 MiB
MIB = 2**20


class Block(nn.Module):
    """An MLP with a residual connection, from [b, h] to [b, h]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """From [b, WIDTH] to [b, WIDTH]. Each unit is gathered, sent and freed as a whole."""

    def __init__(self, width: int = WIDTH, hidden: int = HIDDEN, blocks: int = BLOCKS):
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.last = nn.Linear(hidden, width)

    def units(self) -> list[nn.Module]:
        return [self.first, *self.blocks, self.last]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for unit in self.units():
            x = unit(x)
        return x


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss. (F.mse_loss allocates a buffer, which would change the counts.)"""
    return (outputs - targets).square().mean()


def build_model(device: torch.device | str = "cpu") -> Net:
    """Build the whole model, with the same values on every rank."""
    torch.manual_seed(3)
    return Net().to(device)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return four batches of inputs and targets, both of shape [24, WIDTH]."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES, BATCH, WIDTH, generator=generator)
    return [(x, torch.sin(3 * x)) for x in inputs]


def make_adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Adam:
    """Build an Adam that updates one parameter at a time, so its temporary tensors are small.

    Its eps is as large as the gradients of this lab. A wrong factor in a gradient therefore
    changes the losses.
    """
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-3, foreach=False)


def train_alone(clip: float | None = None) -> tuple[list[float], list[float]]:
    """Train the whole model in one process. Return the losses and gradient norms."""
    model, losses, norms = build_model(), [], []
    adam = make_adam(list(model.parameters()))
    for inputs, targets in make_batches():
        adam.zero_grad()
        loss = mean_square(model(inputs), targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        adam.step()
        losses.append(loss.item())
    return losses, norms


def in_row(numbers: Sequence[float], digits: int = 4) -> str:
    return " ".join(f"{number:.{digits}f}" for number in numbers)


if __name__ == "__main__":
    TRUE_LOSSES, _ = train_alone()
    CLIPPED_LOSSES, TRUE_NORMS = train_alone(CLIP)
    say(f"reference: one process, losses {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## The memory is counted and limited
#
# On an accelerator, the driver refuses to allocate too much memory. In this lab, the class
# `Memory` does this, on a CPU in the same way as on a GPU. It is a `TorchDispatchMode`, so it
# sees every operator that runs inside it. It records each storage that an operator returns,
# until the storage is freed or resized. A tensor and its views share one storage, so a view
# needs no additional memory. If the sum would exceed the limit, `Memory` raises an error:
#
#     out of memory: rank 1 wanted 0.14 MiB with 8.45 MiB in use, the limit is 8.50 MiB
#
# The sum includes parameters, gradients, Adam's moments, activations, gathered blocks and
# temporary tensors. It does not include single numbers (losses and Adam's step counters), the
# batches, which exist before, and memory that a library allocates below PyTorch's operators,
# such as the buffers of gloo. `Memory` also adds up what each of $N$ ranks in a ring sends for
# each collective. For a reduce-scatter and for an all-gather, that is $(N-1)/N$ of the whole
# tensor. For an all-reduce it is twice as much.


# %%
def let_go(done: Callable[[], bool]) -> None:
    """Wait half a second for `done`: gloo's threads drop a collective's buffers a bit late."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


class OutOfMemory(RuntimeError):
    """This rank needs more memory than its limit."""


class Memory(TorchDispatchMode):
    """Count the bytes of live storages on one device. Raise OutOfMemory above the limit."""

    def __init__(self, device: torch.device, limit: int | None = None):
        super().__init__()
        self.device, self.limit = torch.device(device), limit
        self.used = self.peak = 0  # bytes
        self.sent = 0.0  # bytes
        self.sizes: dict[int, tuple[weakref.ref, int]] = {}

    def __enter__(self) -> "Memory":
        self.resize = resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int):
            if storage._cdata in self.sizes:
                self.note(storage, size)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resize_and_note
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor then calls operators on the local tensors
        if func.namespace == "c10d":
            self.sent += ring_bytes(func.overloadpacket.__name__, args)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device == self.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.note(storage, storage.nbytes())
        return result

    def note(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record that a storage has, or will get, this size in bytes."""
        key, size = storage._cdata, size if size > 8 else 0
        _, before = self.sizes.get(key, (None, 0))
        wanted = size - before
        if self.limit is not None and wanted > 0:
            let_go(lambda: self.used + wanted <= self.limit)
        if self.limit is not None and wanted > 0 and self.used + wanted > self.limit:
            raise OutOfMemory(
                f"out of memory: rank {os.environ['RANK']} wanted {wanted / MIB:.2f} MiB with"
                f" {self.used / MIB:.2f} MiB in use, the limit is {self.limit / MIB:.2f} MiB"
            )
        self.sizes[key] = weakref.ref(storage, lambda _: self.forget(key)), size
        self.used += wanted
        self.peak = max(self.peak, self.used)

    def forget(self, key: int) -> None:
        _, size = self.sizes.pop(key)  # before used is read: other threads may free buffers too
        self.used -= size


def ring_bytes(name: str, args: Sequence) -> float:
    """Return the bytes that one rank of a ring sends for a collective."""
    n = dist.get_world_size()
    if "gather" in name:
        return (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[0]))
    if "reduce_scatter" in name:
        return (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[1]))
    if name.startswith("allreduce"):
        return 2 * (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[0]))
    return 0.0


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


def my_batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's rows of the four batches, of shape [24/N, WIDTH]."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [
        (x.chunk(n)[rank].to(device), y.chunk(n)[rank].to(device)) for x, y in make_batches()
    ]


# %% [markdown]
# In this lab, an **engine** is an object with an attribute `model` and a method `step`. You
# call `model` for the forward. After backward, `step` turns the gradients into an update of the
# parameters. The engine `Replicated` is DDP without buckets: every rank keeps everything, and
# the gradients are all-reduced. The function `measure` trains an engine on the four batches
# inside a `Memory`.


# %%
class Replicated:
    """Every rank stores all parameters, gradients and moments."""

    def __init__(self, model: Net):
        self.model = model
        self.adam = make_adam(list(model.parameters()))

    def step(self) -> None:
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        self.adam.step()
        self.adam.zero_grad()


@dataclass
class Measured:
    """The losses of the whole batch, and the bytes that training needed on this rank."""

    losses: list[float]
    stored: int  # bytes between backward and step: parameters, gradients, optimizer states
    peak: int  # bytes, at any time
    sent: float  # bytes, in one step


def measure(
    build: Callable[[Net], object],
    device: torch.device,
    limit: int | None = None,
    steps: int = BATCHES,
    expected: float = math.inf,
) -> Measured:
    """Train the engine that `build` makes of the model, and enforce the limit if there is one.

    `expected` is the number of bytes after backward. The function waits until gloo has freed
    its buffers and the memory is not above this number. Raises OutOfMemory above the limit.
    """
    losses, batches = [], my_batches(device)[:steps]
    with Memory(device, limit) as memory:
        engine = build(build_model(device))
        for inputs, targets in batches:
            memory.sent = 0.0
            loss = mean_square(engine.model(inputs), targets)
            loss.backward()
            let_go(lambda: memory.used <= 1.001 * expected)
            stored = memory.used
            engine.step()
            sent = memory.sent
            losses.append(mean_over_ranks(loss.detach()))
    return Measured(losses, stored, memory.peak, sent)


def mean_over_ranks(number: torch.Tensor) -> float:
    total = number.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# %% [markdown]
# ## Step 1: count the memory of each stage
#
# Which stage of ZeRO do you need? Count first. In float32, a parameter takes 4 bytes, its
# gradient takes 4 bytes, and Adam's two moments take 8 bytes. The sum is $16\Psi$ bytes. (Mixed
# precision gives the same sum. The parameter and the gradient take 2 bytes each, and the
# optimizer takes 12 bytes, because it also keeps a float32 copy of the parameter.) A stage of
# ZeRO says what is **sharded**. Each of the $N$ ranks keeps one $N$-th of a sharded item:
#
# | stage | parameters | gradients | optimizer |
# |---|---|---|---|
# | 0, replicated | whole | whole | whole |
# | 1 | whole | whole | sharded |
# | 2 | whole | sharded | sharded |
# | 3 | sharded | sharded | sharded |
#
# If $N$ does not divide $\Psi$, round the size of a shard up, because all shards are padded to
# the same length. A step also needs memory for a short time: for activations, for whole
# gradients during backward, and for a gathered unit. Leave some room for these. Then choose the
# smallest stage that fits. Stage 3 sends more than stage 2. Stage 2 sends more than stage 1 if
# a step has several micro-batches.


# %%
def bytes_per_rank(psi: int, n: int, stage: int) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and moments on each of n ranks, in float32."""
    # >>> solution 1: 4, 4 and 8 bytes for each parameter, or for each parameter of a shard
    # hint: -(-psi // n) is psi / n rounded up
    shard = -(-psi // n)
    return (
        4 * (shard if stage >= 3 else psi),
        4 * (shard if stage >= 2 else psi),
        8 * (shard if stage >= 1 else psi),
    )
    # <<< solution


def smallest_stage(psi: int, n: int, limit: int, room: int) -> int | None:
    """Return the smallest stage whose states and `room` fit, or None if no stage fits."""
    # >>> solution 1: return the first stage that fits
    for stage in range(4):
        if sum(bytes_per_rank(psi, n, stage)) + room <= limit:
            return stage
    return None
    # <<< solution


# %% [markdown]
# The check first measures the replicated model without a limit and compares the bytes with your
# formula. Then it sets the limit. In all later steps, a stage that fits by your prediction is
# trained under the limit. A stage that does not fit by your prediction is trained without the
# limit, and its peak must exceed the limit.


# %%
if __name__ == "__main__":
    device = init_distributed()
    world = dist.get_world_size()
    PSI = sum(parameter.numel() for parameter in build_model().parameters())
    ROOM = 4 * PSI // 4  # bytes for activations, temporary tensors, and a few whole units

    def assert_losses(losses: Sequence[float], true: Sequence[float]) -> None:
        torch.testing.assert_close(
            torch.tensor(losses),
            torch.tensor(true),
            rtol=1e-4,
            atol=0.0,
            msg=f"the losses are {in_row(losses)}, but one process has {in_row(true)}",
        )

    def fits(stage: int) -> bool:
        return FIRST is not None and stage >= FIRST

    def train_and_report(
        step: int, name: str, build: Callable, stage: int, sends: int, exact: bool = True
    ) -> None:
        """Train, under the limit if the stage fits. Compare the losses and the bytes."""
        formula, traffic = sum(bytes_per_rank(PSI, world, stage)), sends * (world - 1) / world
        found = measure(build, device, LIMIT if fits(stage) else None, expected=formula)
        assert_losses(found.losses, TRUE_LOSSES)
        assert abs(found.stored - formula) <= (0 if exact else formula / 1000), (  # padding
            f"{name} stores {found.stored:,} bytes after backward, but the formula gives"
            f" {formula:,}"
        )
        assert abs(found.sent / (4 * PSI) - traffic) < 0.01, (
            f"{name} sends {found.sent / (4 * PSI):.2f}Ψ per step, but the formula gives"
            f" {traffic:.2f}Ψ"
        )
        assert fits(stage) or found.peak > LIMIT, (
            f"{name} fits, although it should not: its peak is {found.peak:,} bytes"
        )
        what = "trained within" if fits(stage) else "too much for"
        say(
            f"step {step}: {name}, N = {world}: stores {found.stored / MIB:.2f} MiB, formula"
            f" {formula / MIB:.2f}; peak ≈{found.peak / MIB:.1f} MiB, {what} {LIMIT / MIB:.2f};"
            f" sends {found.sent / (4 * PSI):.2f}Ψ, formula {sends}(N-1)/N Ψ = {traffic:.2f}Ψ"
        )

    def check_count() -> None:
        train_and_report(1, "replicated", Replicated, stage=0, sends=2)
        try:
            measure(Replicated, device, LIMIT)
            raise AssertionError("the replicated model fits, so the limit is not enforced")
        except OutOfMemory as error:
            say(f"step 1: {error}")
        for stage in range(4):
            total = sum(bytes_per_rank(PSI, world, stage))
            what = "will fit" if fits(stage) else "will not fit"
            say(f"step 1: stage {stage} stores {total / MIB:5.2f} MiB and {what}")
        if FIRST is None:
            say("step 1: nothing fits, because with one rank nothing can be sharded")

    FIRST = smallest_stage(PSI, world, LIMIT, ROOM)
    check_count()

# %% [markdown]
# ## Step 2: ZeRO-1, shard the optimizer
#
# Adam updates each element separately. A rank can therefore update any part of the parameters
# if it has their gradients and their moments. Let rank $r$ update only part $r$ of the
# parameters. Then it needs only the moments of this part. A step has three operations:
#
# 1. A **reduce-scatter** gives rank $r$ the sum of part $r$ of all ranks' gradients. Divided by
#    $N$, this sum is the mean.
# 2. Adam updates part $r$ of the parameters.
# 3. An **all-gather** gives every rank the new parts of all ranks.
#
# An all-reduce is a reduce-scatter followed by an all-gather. So this step sends the same
# number of elements as before: $2(N-1)/N \cdot \Psi$. The only difference is that the optimizer
# runs between the two halves.
#
# It is easiest to cut equal parts from one flat tensor. `lay_out` copies all tensors into one
# flat tensor, one after the other, and pads it with zeros to a multiple of $N$. It returns the
# flat tensor and its windows, which are views of the flat tensor in the shapes of the given
# tensors. If the windows become the parameters (`parameter.data = window`), an all-gather into
# the flat tensor updates all parameters.


# %%
def lay_out(tensors: Sequence[torch.Tensor], n: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy all tensors into one flat tensor. Return it, and its views in the tensors' shapes.

    Its length is the smallest multiple of n that is large enough. The padding is zero.
    """
    # >>> solution 2: return the flat tensor, and a view of it for each tensor
    # hint: tensors[0].new_zeros(length), flat[a:b].view_as(tensor), and copy_ into the view
    count = sum(tensor.numel() for tensor in tensors)
    flat = tensors[0].new_zeros(-(-count // n) * n)
    windows, place = [], 0
    for tensor in tensors:
        window = flat[place : place + tensor.numel()].view_as(tensor)
        windows.append(window.copy_(tensor))
        place += tensor.numel()
    return flat, windows
    # <<< solution


class ZeRO1:
    """Each rank stores whole parameters and gradients, and the moments of one shard."""

    def __init__(self, model: Net):
        self.model, self.n = model, dist.get_world_size()
        parameters = list(model.parameters())
        self.flat, windows = lay_out([p.detach() for p in parameters], self.n)
        self.gradient, slots = lay_out([torch.zeros_like(p) for p in parameters], self.n)
        for parameter, window, slot in zip(parameters, windows, slots, strict=True):
            parameter.data, parameter.grad = window, slot
        # >>> solution 2: make self.shard a parameter of my part of self.flat, build self.adam
        # hint: nn.Parameter(view) shares the memory of the view, so it is not stored twice
        self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
        self.adam = make_adam([self.shard])
        # <<< solution

    def step(self) -> None:
        # >>> solution 2: reduce-scatter and divide the gradient, step Adam, all-gather
        # hint: dist.reduce_scatter(mine, list(self.gradient.chunk(self.n)))
        # hint: dist.all_gather(list(self.flat.chunk(self.n)), my_part)
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))
        self.shard.grad /= self.n
        self.adam.step()
        dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach())
        # <<< solution
        self.shard.grad = None
        self.gradient.zero_()


# %%
if __name__ == "__main__":

    def check_zero1() -> None:
        train_and_report(2, "ZeRO-1", ZeRO1, stage=1, sends=2)

    check_zero1()

# %% [markdown]
# ## Step 3: ZeRO-2, shard the gradients
#
# ZeRO-1 stores the whole gradient, although a rank uses only one $N$-th of it. Backward
# computes the gradients unit by unit, from the last unit to the first. When the gradients of a
# unit are complete, reduce-scatter them, keep your part, and free the whole gradients of this
# unit. Then at most one unit's gradient is whole at a time. With one micro-batch, the bytes are
# the same as before, and they are sent earlier. With several micro-batches, each micro-batch
# sends its own gradients.
#
# `register_post_accumulate_grad_hook` calls your function when the gradient of a parameter has
# been accumulated. The gradients of a unit arrive one by one, in an order that autograd
# chooses. Start the reduce-scatter when the last of them arrives. To free a gradient, set
# `parameter.grad = None`, so that no reference to the tensor is left.


# %%
class Bucket:
    """The flat parameters of one unit, and this rank's shard of them and of their gradient."""

    def __init__(self, unit: nn.Module):
        self.n, self.parameters = dist.get_world_size(), list(unit.parameters())
        self.flat, windows = lay_out([p.detach() for p in self.parameters], self.n)
        for parameter, window in zip(self.parameters, windows, strict=True):
            parameter.data = window
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
        self.missing = len(self.parameters)

    def ready(self, parameter: nn.Parameter) -> None:
        """Autograd calls this when the gradient of one parameter is complete."""
        # >>> solution 3: after the last parameter, fill self.shard.grad and free the gradients
        # hint: self.missing counts down to 0 and must be reset for the next backward
        # hint: lay_out puts the gradients in the order of the parameters in self.flat
        self.missing -= 1
        if self.missing:
            return
        self.missing = len(self.parameters)
        flat, _ = lay_out([p.grad for p in self.parameters], self.n)
        for p in self.parameters:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(flat.chunk(self.n)))
        self.shard.grad /= self.n
        # <<< solution


class ZeRO2:
    """Each rank stores whole parameters, and the gradients and moments of one shard."""

    def __init__(self, model: Net):
        self.model = model
        self.buckets = [Bucket(unit) for unit in model.units()]
        self.adam = make_adam([bucket.shard for bucket in self.buckets])

    def step(self) -> None:
        # >>> solution 3: step Adam, all-gather the parts of every bucket, clear the gradients
        self.adam.step()
        for bucket in self.buckets:
            dist.all_gather(list(bucket.flat.chunk(bucket.n)), bucket.shard.detach())
        self.adam.zero_grad()
        # <<< solution


# %%
if __name__ == "__main__":

    def check_zero2() -> None:
        train_and_report(3, "ZeRO-2", ZeRO2, stage=2, sends=2)

    check_zero2()

# %% [markdown]
# ## Step 4: ZeRO-3, shard the parameters
#
# The parameters of a unit are needed only while this unit computes. At all other times they are
# idle. So keep only a shard of them. For each use, **gather** the whole parameters, compute,
# and **free** them. A step uses them once in forward and once in backward, which needs the
# weights again. The two all-gathers and the reduce-scatter of the gradients send $3(N-1)/N
# \cdot \Psi$ elements per step, which is 50% more than before. In return, a rank stores only
# $16\Psi/N$ bytes, and one gathered unit in addition.
#
# How can you free memory while autograd and other code still refer to the tensor? You empty its
# storage. `whole.untyped_storage().resize_(0)` frees the bytes, but the tensor, its shape and
# its views remain. `resize_(bytes)` allocates new memory with arbitrary content, and an
# all-gather then fills it.
#
# You need four hooks. Before the forward of a unit, gather. After the forward, free, and
# register a hook with `output.register_hook`. Autograd calls this hook when the gradient of the
# unit's output is known. This is the moment before the unit's backward, so gather again. When
# the gradient of `whole` is complete, free, reduce-scatter the gradient, and keep a shard of
# it.


# %%
class Unit:
    """A unit whose parameters are views of `whole`. Its storage is filled only when needed."""

    def __init__(self, module: nn.Module):
        self.n = dist.get_world_size()
        self.slots = [
            (owner, name, parameter.shape)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
        ]
        flat, _ = lay_out([p.detach() for p in module.parameters()], self.n)
        self.lengths = [shape.numel() for _, _, shape in self.slots]
        self.lengths.append(flat.numel() - sum(self.lengths))  # the padding
        for owner, name, _ in self.slots:
            delattr(owner, name)  # before_forward sets plain attributes with these names
        self.shard = nn.Parameter(flat.chunk(self.n)[dist.get_rank()].clone())
        self.whole = flat.requires_grad_()
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        self.whole.register_post_accumulate_grad_hook(self.reduce_gradient)

    def gather(self) -> None:
        """Allocate the memory of `whole` and fill it from the shards of all ranks."""
        # >>> solution 4: resize the storage to self.whole.nbytes and all-gather into it
        # hint: use chunks of self.whole.data, so that autograd records nothing
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.data.chunk(self.n)), self.shard.data)
        # <<< solution

    def free(self) -> None:
        """Free the memory of `whole`."""
        # >>> solution 4: resize the storage to 0 bytes
        self.whole.untyped_storage().resize_(0)
        # <<< solution

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        # >>> solution 4: gather
        self.gather()
        # <<< solution
        pieces = self.whole.split(self.lengths)  # views, so autograd joins their gradients
        for (owner, name, shape), piece in zip(self.slots, pieces, strict=False):
            setattr(owner, name, piece.view(shape))

    def after_forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        # >>> solution 4: free, and register a hook on the output that gathers again
        # hint: register_hook(f) calls f(gradient); a value that f returns replaces the gradient
        self.free()
        output.register_hook(lambda gradient: self.gather())
        # <<< solution

    def reduce_gradient(self, whole: torch.Tensor) -> None:
        """Autograd calls this when whole.grad is complete. It has the length of `whole`."""
        # >>> solution 4: free, put the mean of my part into self.shard.grad, clear whole.grad
        self.free()
        gradient, whole.grad = whole.grad, None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(gradient.chunk(self.n)))
        self.shard.grad /= self.n
        # <<< solution


class ZeRO3:
    """Each rank stores shards of parameters, gradients and moments."""

    def __init__(self, model: Net):
        self.model = model
        self.units = [Unit(unit) for unit in model.units()]
        self.adam = make_adam([unit.shard for unit in self.units])

    def step(self) -> None:
        self.adam.step()  # no all-gather here, because the next gather sends the new values
        self.adam.zero_grad()


# %%
if __name__ == "__main__":

    def check_zero3() -> None:
        train_and_report(4, "ZeRO-3", ZeRO3, stage=3, sends=3)

    check_zero3()

# %% [markdown]
# ## Step 5: FSDP2's fully_shard
#
# FSDP2's `fully_shard(module, mesh=mesh)` does all of this, with prefetch and overlap. It
# replaces the module's parameters by **DTensors**, of which each rank has its rows, and it
# registers the hooks. The mesh says which ranks take part, and on which device. Without a mesh,
# `fully_shard` uses the accelerator that it finds, even if your ranks are on the CPU.
#
# You must decide how large a unit is. Every call makes one unit of all parameters in the module
# that no earlier call has taken. So call it for the parts first and for the root last. If you
# call it for the root only, the whole model is one unit. Its parameters and its gradients are
# whole at the same time, and the run is out of memory, although everything is sharded between
# the steps. If you call it for every linear layer, the units are small and there are many
# messages, and each message has its own latency.
#
# By default, a unit is freed after its forward (`reshard_after_forward=True`). If you keep it,
# you save the second all-gather and pay with memory. Build the optimizer after the last call of
# `fully_shard`, because the DTensors that it must update do not exist earlier.


# %%
def all_ranks() -> DeviceMesh:
    """Return the mesh of all ranks, on the device of their group. For gloo this is the CPU."""
    cpu = dist.get_backend() == "gloo"
    kind = "cpu" if cpu else torch.accelerator.current_accelerator().type
    return DeviceMesh(kind, list(range(dist.get_world_size())))


def shard_model(model: Net) -> tuple[Net, torch.optim.Adam]:
    """Shard the model in place, with one unit per model.units(). Return it and its Adam."""
    mesh = all_ranks()
    # >>> solution 5: shard the units, shard the root, build Adam
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_adam(list(model.parameters()))
    # <<< solution


class Sharded:
    """An engine that uses FSDP2."""

    def __init__(self, model: Net):
        self.model, self.adam = shard_model(model)

    def step(self) -> None:
        self.adam.step()
        self.adam.zero_grad()


class RootAlone(Sharded):
    """The model as one unit. This needs too much memory."""

    def __init__(self, model: Net):
        self.model = fully_shard(model, mesh=all_ranks(), reshard_after_forward=True)
        self.adam = make_adam(list(model.parameters()))


# %%
if __name__ == "__main__":

    def check_fsdp2() -> None:
        found = measure(RootAlone, device)
        assert_losses(found.losses, TRUE_LOSSES)
        assert found.peak > LIMIT, "FSDP2 on the root alone fits, although it should not"
        say(
            f"step 5: FSDP2 on the root alone: peak ≈{found.peak / MIB:.1f} MiB, too much for"
            f" {LIMIT / MIB:.2f}"
        )
        train_and_report(5, "FSDP2 on every unit", Sharded, stage=3, sends=3, exact=False)

    check_fsdp2()

# %% [markdown]
# ## Step 6: clipping and micro-batches
#
# **Clipping** scales the gradient down if its norm exceeds a limit. The norm is the norm of the
# *whole* gradient, and a rank has only a shard of it. Squares can be added over the ranks, but
# norms cannot. So compute the sum of the squares of your shards, all-reduce this sum, and take
# the root. If each rank clipped by the norm of its own shards, the ranks would use different
# factors, and no error would be raised.
#
# **Accumulation** runs several micro-batches before one step. Each micro-batch has its own
# loss. Divide each loss by the number of micro-batches, so that the sum of all losses is the
# mean. DDP can skip the communication in all micro-batches except the last (`no_sync`). FSDP2
# can do this too, with `model.set_requires_gradient_sync(False)`. But a gradient that is not
# reduced stays whole and needs $4\Psi$ bytes instead of $4\Psi/N$. On two ranks this does not
# fit here, and on four ranks it would. Reduce the gradients in every micro-batch.


# %%
def clip_gradients(gradients: Sequence[torch.Tensor], limit: float) -> float:
    """Scale the whole gradient, of which `gradients` are this rank's shards.

    Its norm is then at most `limit`. Returns the norm before scaling, which is the same on all
    ranks. Like torch, it multiplies in place by limit / (norm + 1e-6) if that is below 1.
    """
    # >>> solution 6: add the squares of all ranks, take the root, scale by one factor
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    scale = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient *= scale
    return norm
    # <<< solution


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, micro_batches: int
) -> torch.Tensor:
    """Compute the gradients of the mean loss over these rows. Return that loss, detached.

    Runs `micro_batches` micro-batches with equal numbers of rows, one after the other.
    """
    # >>> solution 6: for each chunk of rows: forward, divide the loss, backward
    total = torch.zeros((), device=inputs.device, dtype=inputs.dtype)
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = mean_square(model(x), y) / micro_batches
        loss.backward()
        total += loss.detach()
    return total
    # <<< solution


# %%
def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_sharded(
    model: Net, adam: torch.optim.Adam, batches: Sequence
) -> tuple[list[float], list[float]]:
    """Train with accumulation and clipping. Return the losses and gradient norms."""
    losses, norms = [], []
    for inputs, targets in batches:
        losses.append(mean_over_ranks(accumulate(model, inputs, targets, MICRO_BATCHES)))
        # do not store this list in a variable, which would keep the old gradients in memory
        norms.append(clip_gradients([local(p.grad) for p in model.parameters()], CLIP))
        adam.step()
        adam.zero_grad()
    return losses, norms


if __name__ == "__main__":
    MAYBE = LIMIT if FIRST is not None else None  # no limit with one rank

    def check_clipping() -> None:
        batches = my_batches(device)
        with Memory(device, MAYBE):
            losses, norms = train_sharded(*shard_model(build_model(device)), batches)
        assert_losses(losses, CLIPPED_LOSSES)
        torch.testing.assert_close(
            torch.tensor(norms),
            torch.tensor(TRUE_NORMS),
            rtol=1e-3,
            atol=0.0,
            msg=f"the norms are {in_row(norms)}, but one process has {in_row(TRUE_NORMS)}",
        )
        say(
            f"step 6: {MICRO_BATCHES} micro-batches, clipped to {CLIP}: norms {in_row(norms)};"
            f" losses {in_row(losses)}"
        )

    check_clipping()

# %% [markdown]
# ## Step 7: a checkpoint for any number of ranks
#
# A training run can last for weeks, and later you may have a different number of machines. Each
# rank writes its own shards, because no rank could store the whole model. A metadata file says
# which file contains which rows of which tensor. A rank that loads the checkpoint reads the
# rows that it needs from the right files. `torch.distributed.checkpoint` does this.
# `dcp.save(state, checkpoint_id=folder, process_group=group)` saves a state. `dcp.load` fills a
# state that you have prepared, *in place*. The prepared state tells it which rows are wanted.
#
# `get_state_dict(model, adam)` returns two dictionaries. They use names instead of numbers,
# also for Adam's moments. The moments belong in the checkpoint like the parameters. Without
# them, Adam starts with empty moments and the loss jumps. The number of the step at which you
# stopped also belongs in the checkpoint. After loading, call `set_state_dict(model, adam,
# model_state_dict=…, optim_state_dict=…)`. It copies the loaded values into the model and the
# optimizer. `group` is the group of the ranks that take part. If only two of four ranks load, a
# call without the group would wait for the other two.


# %%
def save(
    model: Net,
    adam: torch.optim.Adam,
    step: int,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write parameters, Adam's states and the step. All ranks of `group` must call this."""
    # >>> solution 7: call get_state_dict, and dcp.save with a dictionary of all three
    parameters, moments = get_state_dict(model, adam)
    state = {"model": parameters, "adam": moments, "step": step}
    dcp.save(state, checkpoint_id=folder, process_group=group)
    # <<< solution


def load(
    model: Net,
    adam: torch.optim.Adam,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Load a checkpoint into a model and Adam that the group shards. Return the step."""
    # >>> solution 7: build the same dictionary, call dcp.load with it, call set_state_dict
    # hint: dcp.load also replaces numbers, so state["step"] changes
    parameters, moments = get_state_dict(model, adam)
    state = {"model": parameters, "adam": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(model, adam, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]
    # <<< solution


# %% [markdown]
# The check trains two steps on all ranks and saves. Then it loads the checkpoint into a model
# with different parameters, on all ranks, on two ranks, and on one rank. It compares every bit
# with the saved model. At the end, all ranks train two more steps, and their losses must equal
# the losses of one process.


# %%
def sharded_over(mesh: DeviceMesh, device: torch.device) -> tuple[Net, torch.optim.Adam]:
    """Build a model with different parameters, sharded over a mesh, and its Adam."""
    model = build_model(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for module in [*model.units(), model]:
        fully_shard(module, mesh=mesh)
    return model, make_adam(list(model.parameters()))


def every_bit(model: nn.Module, adam: torch.optim.Adam) -> list[torch.Tensor]:
    """Return all parameters and all states of Adam as whole tensors on the CPU."""
    found = []
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *adam.state[parameter].values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.append(whole.cpu())
    return found


def shared_folder() -> Path:
    """Create a folder on rank 0 and return its path on all ranks."""
    name = [tempfile.mkdtemp(prefix="lab03-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name, src=0)
    return Path(name[0])


if __name__ == "__main__":

    def check_checkpoint() -> None:
        folder, batches, loaded = shared_folder(), my_batches(device), []
        model, adam = shard_model(build_model(device))
        train_sharded(model, adam, batches[:2])
        save(model, adam, 2, folder)
        saved = every_bit(model, adam)
        for n in sorted({world, min(world, 2), 1}, reverse=True):
            mesh = DeviceMesh(device.type, list(range(n)))  # all ranks call this
            if dist.get_rank() < n:
                model, adam = sharded_over(mesh, device)
                step = load(model, adam, folder, mesh.get_group())
                bits = every_bit(model, adam)
                assert step == 2, f"{n} ranks loaded step {step} instead of step 2"
                assert len(bits) == len(saved) and all(map(torch.equal, bits, saved)), (
                    f"the values that {n} ranks loaded differ from those that {world} saved"
                )
            loaded.append(n)
            if n == world:
                trained = model, adam
            dist.barrier()
        losses, _ = train_sharded(*trained, batches[2:])
        assert_losses(losses, CLIPPED_LOSSES[2:])
        files = len(list(folder.glob("*.distcp")))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        say(
            f"step 7: {world} ranks wrote {files} files; loaded with"
            f" {', '.join(map(str, loaded))} ranks, equal bit for bit;"
            f" next losses {in_row(losses)}"
        )

    check_checkpoint()

# %% [markdown]
# ## Step 8: a model that is too large for one rank
#
# So far, every rank built the whole model and then freed most of it. For a moment this needs
# $4\Psi$ bytes. A rank may not have this memory for a model of 70 billion parameters. Build
# such a model on the **meta device**, where tensors have shapes but no memory, and shard it
# there. Then call `model.to_empty(device=…)`, which allocates only the shards of this rank.
# Their content is arbitrary, so you must write *every* value.
#
# The values can come from a checkpoint, as in step 7, or from an initialization. Do not call
# `reset_parameters` on the shards. On the CPU, every rank with the same seed draws the same
# numbers for its rows. With different seeds, the model depends on the number of ranks. Instead,
# draw one whole layer at a time from the same seed on all ranks, and keep the rows of this
# rank. The result equals the model of one process, bit for bit.


# %%
def my_rows(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return this rank's rows of a tensor that has the layout of `parameter`."""
    mesh = parameter.device_mesh
    rows = whole.detach().chunk(mesh.size())
    return rows[mesh.get_local_rank()] if mesh.get_local_rank() < len(rows) else whole[:0]


def build_sharded(device: torch.device) -> tuple[Net, torch.optim.Adam]:
    """Build the model of build_model in shards, without ever having it whole, and its Adam."""
    # >>> solution 8: build Net() on the meta device, call shard_model and to_empty
    # hint: a module that is built inside `with torch.device("meta"):` has no memory
    with torch.device("meta"):
        model = Net()
    model, adam = shard_model(model)
    model.to_empty(device=device)
    # <<< solution
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # >>> solution 8: draw a whole nn.Linear of this size, copy my rows into my shards
            # hint: module.in_features, module.out_features; my_rows(drawn, module.weight)
            # hint: parameter.to_local() is this rank's shard; use copy_ under no_grad
            whole = nn.Linear(module.in_features, module.out_features)
            with torch.no_grad():
                for ours, drawn in zip(module.parameters(), whole.parameters(), strict=True):
                    ours.to_local().copy_(my_rows(drawn, ours))
            # <<< solution
    return model, adam


# %% [markdown]
# The check compares all bits. It also compares the peak memory with the memory for a shard of
# the model and one whole layer. Then it trains with everything that you wrote, under the limit.


# %%
if __name__ == "__main__":

    def check_meta() -> None:
        batches = my_batches(device)
        with Memory(device) as memory:
            model, adam = build_sharded(device)
        layer = 4 * 4 * HIDDEN * (HIDDEN + 1)  # bytes of a block's linear, with its bias
        bound = 4 * PSI // world + 4 * layer
        assert memory.peak <= bound, (
            f"building the model needed {memory.peak:,} bytes, but {bound:,} are enough"
        )
        for ours, true in zip(model.parameters(), build_model().parameters(), strict=True):
            assert torch.equal(ours.full_tensor().cpu(), true.detach()), (
                "the parameters differ from those of build_model"
            )
        say(
            f"step 8: built with ≈{memory.peak / MIB:.2f} MiB; the whole model has"
            f" {4 * PSI / MIB:.2f} MiB; equal bit for bit"
        )
        with Memory(device, MAYBE):
            model, adam = build_sharded(device)
            losses, _ = train_sharded(model, adam, batches[:2])
        assert_losses(losses, CLIPPED_LOSSES[:2])

    check_meta()
    where = f"within {LIMIT / MIB:.2f} MiB per rank" if FIRST is not None else "on one rank"
    say(
        f"16Ψ = {16 * PSI / MIB:.2f} MiB of states, trained {where}:"
        f" the losses are those of one process, {CLIPPED_LOSSES[-1]:.4f}"
    )
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end

# %% [markdown]
# ## Where to go from here
#
# - Use 13 as `HIDDEN` and 7 as `WIDTH`, so that no tensor can be cut into equal shards. Which
#   numbers still agree with the formulas exactly, which do not, and why?
# - Let `Unit.gather` of one unit start the all-gather of the next unit (`async_op=True`), as
#   `mini_fsdp.py` of chapter 04 does. By how much does the peak memory rise?
# - In `accumulate`, set `model.set_requires_gradient_sync(False)` for all micro-batches except
#   the last. Predict the peak memory, and then measure it.
# - Give `fully_shard` a `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. What does a rank
#   store now, what does it send, and why are the losses no longer those of one process?
# - On four ranks, shard over pairs of ranks and replicate across the pairs (a 2D mesh). Which
#   formula is right for the memory now?
