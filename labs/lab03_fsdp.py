# %% [markdown]
# # Lab 03: Shard a model with ZeRO and FSDP
#
# You get a model, Adam, and a limit: 8.5 MiB of memory for each rank. Replicated, as DDP keeps
# it, the model needs 13.7 MiB on every rank, however many ranks there are, and training ends
# with *out of memory*. In this lab you shard it until it fits: first the optimizer's states,
# then the gradients, then the parameters (ZeRO's stages 1, 2 and 3, by hand), then all of it by
# FSDP2's `fully_shard`. You clip and accumulate with shards, save a checkpoint and load it on
# another number of ranks, and build a model that no rank ever holds whole. All the while the
# losses must be those of one process, and the bytes those of the formulas.
#
#     torchrun --nproc-per-node=4 labs/lab03_fsdp.py
#
# runs the finished lab, on the CPU or on one GPU per process, with 1, 2, 3 or 4 ranks. (One
# rank has nobody to share with: nothing fits then, and the steps show their results alone.) To
# do it yourself:
#
#     python labs/start.py 03
#     torchrun --nproc-per-node=4 my_labs/lab03_fsdp.py
#     python labs/check.py my_labs/lab03_fsdp.py
#
# The first line writes your copy, with blanks, to `my_labs/`. The last one grades it, step by
# step, at 1, 2 and 3 ranks; `--step 2` grades one step, `--output` shows what failing ranks
# printed. Work in a clone of the repository, with its Python: `make test WHAT=labs` sets it up
# once, and `source .venv/bin/activate` puts torchrun on the path.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check
# which prints what it proved. Your copy runs as far as the first blank and says in one line
# what belongs there; the long report below that line is torchrun's. If your copy stops
# without a word, press Ctrl-C and run `check.py`: ranks that wait for each other print
# nothing. In `check.py` every step stands on finished versions of the steps before it, so you
# can take them in any order. Allow four hours. Lab 02 comes first. Chapter 04 derives what you
# write here: read it to "From scratch" before step 1, "Stage 3: parameters as guests" before
# step 4, and "For real: fully_shard" before step 5.

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
        sys.exit("start me with: torchrun --nproc-per-node=4 lab03_fsdp.py")
    if os.environ["WORLD_SIZE"] not in ("1", "2", "3", "4"):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # one rank says it; torchrun then ends the others
        sys.exit("24 rows and 96 columns are cut into equal parts: start 1, 2, 3 or 4 ranks")
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The truth: one process, the whole model
#
# Fourteen units: a linear layer in, twelve residual blocks, a linear layer out;
# $\Psi$ = 897,540 parameters in float32. One process trains it with Adam on four batches of 24
# rows. Its losses are what every sharded version must arrive at. A second run clips the
# gradient's norm to 0.1; you will need that in step 6.

# %%
WIDTH, HIDDEN, BLOCKS = 36, 96, 12
BATCH, BATCHES, MICRO_BATCHES = 24, 4, 2
LEARNING_RATE, CLIP = 1e-3, 0.1
LIMIT = 17 * 2**19  # bytes for each rank: 8.5 MiB
MIB = 2**20


class Block(nn.Module):
    """An MLP with a residual connection around it, [b, h] to [b, h]."""

    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """[b, WIDTH] to [b, WIDTH]. `units` are what is gathered, sent and freed in one piece."""

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
    """The loss. (F.mse_loss keeps a buffer behind its result, which would blur the counts.)"""
    return (outputs - targets).square().mean()


def build_model(device: torch.device | str = "cpu") -> Net:
    """The whole model, the same wherever it is built."""
    torch.manual_seed(3)
    return Net().to(device)


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four batches of inputs and targets, both [24, WIDTH]."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(BATCHES, BATCH, WIDTH, generator=generator)
    return [(x, torch.sin(3 * x)) for x in inputs]


def make_adam(parameters: Sequence[nn.Parameter]) -> torch.optim.Adam:
    """Adam, one parameter after the other: its temporaries are then those of one parameter.

    Its eps is as large as the gradients here, so that a wrong factor in them shows.
    """
    return torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-3, foreach=False)


def train_alone(clip: float | None = None) -> tuple[list[float], list[float]]:
    """Train the whole model in one process; return losses and gradient norms, step by step."""
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
    say(f"the truth: one process, losses {in_row(TRUE_LOSSES)}")

# %% [markdown]
# ## The memory: counted, and limited
#
# On an accelerator, the driver says no. Here the lab does, in the same way on a CPU and a GPU.
# `Memory` sees every operator that runs inside of it (a `TorchDispatchMode`), and notes each
# storage that an operator returns, until it is freed or resized. A storage is what tensors and
# their views share, so a view costs nothing. Where the sum would pass the limit, it raises:
#
#     out of memory: rank 1 wanted 0.14 MiB with 8.45 MiB in use, the limit is 8.50 MiB
#
# Parameters, gradients, Adam's moments, activations, gathered blocks, temporaries: all of it
# counts. Not counted are numbers by themselves (losses, Adam's step counters), batches, which
# exist before, and what a library allocates below PyTorch's operators, such as gloo's buffers.
# It also adds up what a ring of $N$ ranks sends for each collective, per rank: $(N-1)/N$ of the
# whole tensor for a reduce-scatter and for an all-gather, twice that for an all-reduce.


# %%
def let_go(done: Callable[[], bool]) -> None:
    """Wait half a second for `done`: gloo's threads drop a collective's buffers a bit late."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


class OutOfMemory(RuntimeError):
    """This rank asked for more than its limit."""


class Memory(TorchDispatchMode):
    """Count the bytes of live storages on one device; refuse to pass the limit."""

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
            return NotImplemented  # it comes back here with the local tensors
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
        """A storage has, or is to get, this size in bytes."""
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
    """What one rank of a ring sends for a collective, in bytes."""
    n = dist.get_world_size()
    if "gather" in name:
        return (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[0]))
    if "reduce_scatter" in name:
        return (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[1]))
    if name.startswith("allreduce"):
        return 2 * (n - 1) / n * sum(t.nbytes for t in tree_leaves(args[0]))
    return 0.0


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


def my_batches(device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's rows of the four batches, [24/N, WIDTH] each."""
    rank, n = dist.get_rank(), dist.get_world_size()
    return [
        (x.chunk(n)[rank].to(device), y.chunk(n)[rank].to(device)) for x, y in make_batches()
    ]


# %% [markdown]
# An **engine** is anything with a `model` to call and a `step` that turns the gradients which
# backward has left into an update. `Replicated` is DDP without its buckets: every rank keeps
# everything, and the gradients are all-reduced. `measure` trains an engine on the four batches
# inside of a `Memory`.


# %%
class Replicated:
    """Everything on every rank."""

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
    """What training took, on this rank; and the losses of the whole batch."""

    losses: list[float]
    held: int  # bytes between backward and step: parameters, gradients, optimizer states
    peak: int  # bytes, at any time
    sent: float  # bytes, in one step


def measure(
    build: Callable[[Net], object],
    device: torch.device,
    limit: int | None = None,
    steps: int = BATCHES,
    holds: float = math.inf,
) -> Measured:
    """Train what `build` makes of the model; raise OutOfMemory where it passes the limit.

    `holds`: bytes expected after backward, for which to wait until gloo has let go of the rest.
    """
    losses, batches = [], my_batches(device)[:steps]
    with Memory(device, limit) as memory:
        engine = build(build_model(device))
        for inputs, targets in batches:
            memory.sent = 0.0
            loss = mean_square(engine.model(inputs), targets)
            loss.backward()
            let_go(lambda: memory.used <= 1.001 * holds)
            held = memory.used
            engine.step()
            sent = memory.sent
            losses.append(mean_over_ranks(loss.detach()))
    return Measured(losses, held, memory.peak, sent)


def mean_over_ranks(number: torch.Tensor) -> float:
    total = number.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


# %% [markdown]
# ## Step 1: count before you cut
#
# In float32, a parameter takes 4 bytes, its gradient 4, Adam's two moments 8: 16 bytes, so
# $16\Psi$ in all. (Mixed precision comes to the same sum in another way: 2 + 2 for parameter
# and gradient in 16 bits, 12 for the optimizer, which then keeps a float32 copy as well.) A
# stage of ZeRO says what is **sharded**, that is, of what each of $N$ ranks keeps one $N$-th:
#
# | stage | parameters | gradients | optimizer |
# |---|---|---|---|
# | 0, replicated | whole | whole | whole |
# | 1 | whole | whole | sharded |
# | 2 | whole | sharded | sharded |
# | 3 | sharded | sharded | sharded |
#
# If $N$ does not divide $\Psi$, round a shard up: all are padded to equal length. On top of the
# states comes what one step needs for a while: activations, whole gradients in backward's
# hands, a gathered unit. Keep some room for these. The smallest stage that fits is the one to
# take: stage 3 has more to send, and stage 2 too where a step has several micro-batches.


# %%
def bytes_per_rank(psi: int, n: int, stage: int) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and Adam's moments on one of n ranks, all in float32."""
    # >>> solution 1: 4, 4 and 8 bytes for each parameter, or for each of a shard
    # hint: -(-psi // n) is psi / n, rounded up
    shard = -(-psi // n)
    return (
        4 * (shard if stage >= 3 else psi),
        4 * (shard if stage >= 2 else psi),
        8 * (shard if stage >= 1 else psi),
    )
    # <<< solution


def smallest_stage(psi: int, n: int, limit: int, room: int) -> int | None:
    """The smallest stage whose states leave `room` bytes below the limit; None if none does."""
    # >>> solution 1: try the stages in order
    for stage in range(4):
        if sum(bytes_per_rank(psi, n, stage)) + room <= limit:
            return stage
    return None
    # <<< solution


# %% [markdown]
# The check measures the replicated model without a limit, compares, and then sets the limit.
# From here on, what you predict to fit is trained under the limit, and what you predict not to
# fit is trained without, and its peak must be above it.


# %%
if __name__ == "__main__":
    device = start()
    world = dist.get_world_size()
    PSI = sum(parameter.numel() for parameter in build_model().parameters())
    ROOM = 4 * PSI // 4  # bytes of activations, temporaries, and a few units in passing

    def assert_losses(losses: Sequence[float], true: Sequence[float]) -> None:
        torch.testing.assert_close(
            torch.tensor(losses),
            torch.tensor(true),
            rtol=1e-4,
            atol=0.0,
            msg=f"the losses are {in_row(losses)}, of one process {in_row(true)}",
        )

    def fits(stage: int) -> bool:
        return FIRST is not None and stage >= FIRST

    def train_and_report(
        step: int, name: str, build: Callable, stage: int, sends: int, exact: bool = True
    ) -> None:
        """Train, under the limit if the stage fits; hold losses and bytes against the truth."""
        formula, traffic = sum(bytes_per_rank(PSI, world, stage)), sends * (world - 1) / world
        found = measure(build, device, LIMIT if fits(stage) else None, holds=formula)
        assert_losses(found.losses, TRUE_LOSSES)
        assert abs(found.held - formula) <= (0 if exact else formula / 1000), (  # padding
            f"{name} holds {found.held:,} bytes after backward, the formula says {formula:,}"
        )
        assert abs(found.sent / (4 * PSI) - traffic) < 0.01, (
            f"{name} sends {found.sent / (4 * PSI):.2f}Ψ a step, the formula says"
            f" {traffic:.2f}Ψ"
        )
        assert fits(stage) or found.peak > LIMIT, (
            f"{name} would fit: its peak is {found.peak:,}"
        )
        what = "trained within" if fits(stage) else "too much for"
        say(
            f"step {step}: {name}, N = {world}: holds {found.held / MIB:.2f} MiB, formula"
            f" {formula / MIB:.2f}; peak ≈{found.peak / MIB:.1f} MiB, {what} {LIMIT / MIB:.2f};"
            f" sends {found.sent / (4 * PSI):.2f}Ψ, formula {sends}(N-1)/N Ψ = {traffic:.2f}Ψ"
        )

    def check_count() -> None:
        train_and_report(1, "replicated", Replicated, stage=0, sends=2)
        try:
            measure(Replicated, device, LIMIT)
            raise AssertionError("the replicated model fits: the limit is not enforced")
        except OutOfMemory as error:
            say(f"step 1: {error}")
        for stage in range(4):
            total = sum(bytes_per_rank(PSI, world, stage))
            what = "will fit" if fits(stage) else "will not fit"
            say(f"step 1: stage {stage} holds {total / MIB:5.2f} MiB, and {what}")
        if FIRST is None:
            say("step 1: nothing fits, for one rank has nobody to share with")

    FIRST = smallest_stage(PSI, world, LIMIT, ROOM)
    check_count()

# %% [markdown]
# ## Step 2: ZeRO-1, the optimizer in shards
#
# Adam looks at each number by itself: a rank can update any part of the parameters, if it has
# their gradients and their moments. So let rank $r$ update the $r$-th part alone, and keep the
# moments of that part alone. Three things make a step:
#
# 1. A **reduce-scatter** brings rank $r$ the sum of the $r$-th parts of all ranks' gradients;
#    divided by $N$ it is their mean.
# 2. Adam updates the $r$-th part of the parameters.
# 3. An **all-gather** passes the new parts round.
#
# An all-reduce is just a reduce-scatter and an all-gather, so this costs no byte more than
# before: $2(N-1)/N \cdot \Psi$ elements. The optimizer has moved in between.
#
# Equal parts are easiest to cut from one flat tensor. `lay_out` copies tensors into one, one
# behind the other, padded with zeros to a multiple of $N$, and returns the windows in which
# they now lie. Make the parameters *be* these windows (`parameter.data = window`), and an
# all-gather into the flat tensor updates them all.


# %%
def lay_out(tensors: Sequence[torch.Tensor], n: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One flat tensor with copies of all values, and views of it in the tensors' shapes.

    Its length is a multiple of n; what is left over at the end is zero.
    """
    # >>> solution 2: the flat tensor, and for each tensor a view of its part, in its shape
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
    """Whole parameters and gradients, and the moments of one shard."""

    def __init__(self, model: Net):
        self.model, self.n = model, dist.get_world_size()
        parameters = list(model.parameters())
        self.flat, windows = lay_out([p.detach() for p in parameters], self.n)
        self.gradient, slots = lay_out([torch.zeros_like(p) for p in parameters], self.n)
        for parameter, window, slot in zip(parameters, windows, slots, strict=True):
            parameter.data, parameter.grad = window, slot
        # >>> solution 2: self.shard, my part of self.flat, as a parameter; self.adam for it
        # hint: nn.Parameter(view) shares the memory of the view, so nothing is held twice
        self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
        self.adam = make_adam([self.shard])
        # <<< solution

    def step(self) -> None:
        # >>> solution 2: the mean of my part of the gradient, Adam, and all parts to all ranks
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
# ## Step 3: ZeRO-2, gradients leave as they come
#
# ZeRO-1 uses one $N$-th of the gradient and keeps all of it. Backward makes gradients unit by
# unit, from the last to the first. As soon as a unit's are complete, reduce-scatter them, keep
# your part, and free the rest: then there is never more than one unit's gradient whole. Of one
# micro-batch the bytes sent are the same, and leave earlier; of several each reduces its own.
#
# `register_post_accumulate_grad_hook` calls you when a parameter's gradient has been
# accumulated; the parameters of a unit come one at a time, in an order of backward's choice.
# The last of them sets the reduce-scatter off. Free means: `parameter.grad = None`, so that no
# reference is left.


# %%
class Bucket:
    """The parameters of one unit, flat; this rank's shard of them and of their gradient."""

    def __init__(self, unit: nn.Module):
        self.n, self.parameters = dist.get_world_size(), list(unit.parameters())
        self.flat, windows = lay_out([p.detach() for p in self.parameters], self.n)
        for parameter, window in zip(self.parameters, windows, strict=True):
            parameter.data = window
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.shard = nn.Parameter(self.flat.chunk(self.n)[dist.get_rank()])
        self.missing = len(self.parameters)

    def ready(self, parameter: nn.Parameter) -> None:
        """The gradient of one parameter is complete."""
        # >>> solution 3: with the unit's last: fill self.shard.grad, free the whole gradients
        # hint: self.missing counts down to 0, and must start again for the next backward
        # hint: lay_out puts the gradients side by side, as the parameters are in self.flat
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
    """Whole parameters; gradients and moments of a shard."""

    def __init__(self, model: Net):
        self.model = model
        self.buckets = [Bucket(unit) for unit in model.units()]
        self.adam = make_adam([bucket.shard for bucket in self.buckets])

    def step(self) -> None:
        # >>> solution 3: Adam on the shards, every bucket's parts to all ranks, no gradients
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
# ## Step 4: ZeRO-3, parameters as guests
#
# A unit's parameters are needed while that unit computes, and idle while the others do. So keep
# only a shard of them, and for each use **gather** the whole, compute, and **free** it: once in
# forward, once more in backward, which needs the weights again. With the reduce-scatter of the
# gradients that is $3(N-1)/N \cdot \Psi$ elements a step, half as much again as before. It buys
# that nothing at all is held whole: $16\Psi/N$, and one unit on top.
#
# How can memory go while tensors still refer to it, autograd's among them? By taking the
# storage away from under them: `whole.untyped_storage().resize_(0)` frees the bytes and leaves
# the tensor, its shape and its views; `resize_(bytes)` gives it new ones, with arbitrary
# content, which an all-gather fills.
#
# Four moments, four hooks. Before a unit's forward, gather. After it, free, and ask autograd
# for a call when the gradient of the unit's output is known (`output.register_hook`): that is
# the moment before its backward, so gather again. When the gradient of `whole` is complete,
# free, reduce-scatter, and keep a shard of it.


# %%
class Unit:
    """A unit whose parameters are views of `whole`, whose memory comes and goes."""

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
            delattr(owner, name)  # plain attributes take their places in before_forward
        self.shard = nn.Parameter(flat.chunk(self.n)[dist.get_rank()].clone())
        self.whole = flat.requires_grad_()
        self.free()
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        self.whole.register_post_accumulate_grad_hook(self.reduce_gradient)

    def gather(self) -> None:
        """Give `whole` its memory back and fill it from all ranks' shards."""
        # >>> solution 4: resize the storage to self.whole.nbytes, and all-gather into it
        # hint: chunks of self.whole.data: no graph may come of this
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.data.chunk(self.n)), self.shard.data)
        # <<< solution

    def free(self) -> None:
        """Take the memory of `whole` away."""
        # >>> solution 4: resize the storage
        self.whole.untyped_storage().resize_(0)
        # <<< solution

    def before_forward(self, module: nn.Module, inputs: tuple) -> None:
        # >>> solution 4: gather
        self.gather()
        # <<< solution
        pieces = self.whole.split(self.lengths)  # views: autograd will join their gradients
        for (owner, name, shape), piece in zip(self.slots, pieces, strict=False):
            setattr(owner, name, piece.view(shape))

    def after_forward(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        # >>> solution 4: free, and let the output's gradient gather again
        # hint: output.register_hook(f) calls f(gradient); what f returns replaces the gradient
        self.free()
        output.register_hook(lambda gradient: self.gather())
        # <<< solution

    def reduce_gradient(self, whole: torch.Tensor) -> None:
        """The gradient of `whole` is complete: whole.grad, as long as `whole`."""
        # >>> solution 4: free, put the mean of my part into self.shard.grad, drop whole.grad
        self.free()
        gradient, whole.grad = whole.grad, None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(gradient.chunk(self.n)))
        self.shard.grad /= self.n
        # <<< solution


class ZeRO3:
    """Shards of everything."""

    def __init__(self, model: Net):
        self.model = model
        self.units = [Unit(unit) for unit in model.units()]
        self.adam = make_adam([unit.shard for unit in self.units])

    def step(self) -> None:
        self.adam.step()  # nothing to pass round: the next gather does that
        self.adam.zero_grad()


# %%
if __name__ == "__main__":

    def check_zero3() -> None:
        train_and_report(4, "ZeRO-3", ZeRO3, stage=3, sends=3)

    check_zero3()

# %% [markdown]
# ## Step 5: the same by fully_shard
#
# FSDP2's `fully_shard(module, mesh=mesh)` does all this, with prefetch and overlap: it turns
# the module's parameters into **DTensors** of which each rank holds its rows, and sets the
# hooks. The mesh says which ranks, and on what device: without one it takes the accelerator
# that it sees, also where these ranks are on the CPU. What it does not know is how large a
# unit should be. Every call makes one unit of all parameters in the module that no earlier
# call has taken. So wrap from the inside out: the parts first, the root last. If you wrap the
# root alone, the whole model is one unit, gathered whole, and with whole gradients: sharded,
# and out of memory all the same. If you wrap every linear layer, units are small, and messages
# are many: each has its latency.
#
# By default a unit is freed after its forward (`reshard_after_forward=True`); kept, it saves
# the second all-gather and costs the memory. And the optimizer comes last: the parameters it
# is to update are the DTensors, which did not exist before.


# %%
def all_ranks() -> DeviceMesh:
    """The mesh of all ranks, on the device of their group: gloo's is the CPU."""
    cpu = dist.get_backend() == "gloo"
    kind = "cpu" if cpu else torch.accelerator.current_accelerator().type
    return DeviceMesh(kind, list(range(dist.get_world_size())))


def shard_model(model: Net) -> tuple[Net, torch.optim.Adam]:
    """The model, fully sharded in place, one unit for each of model.units(), and its Adam."""
    mesh = all_ranks()
    # >>> solution 5: wrap the units, wrap the root, make Adam
    for unit in model.units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make_adam(list(model.parameters()))
    # <<< solution


class Sharded:
    """FSDP2 as an engine."""

    def __init__(self, model: Net):
        self.model, self.adam = shard_model(model)

    def step(self) -> None:
        self.adam.step()
        self.adam.zero_grad()


class RootAlone(Sharded):
    """The model as one unit: how not to do it."""

    def __init__(self, model: Net):
        self.model = fully_shard(model, mesh=all_ranks(), reshard_after_forward=True)
        self.adam = make_adam(list(model.parameters()))


# %%
if __name__ == "__main__":

    def check_fsdp2() -> None:
        found = measure(RootAlone, device)
        assert_losses(found.losses, TRUE_LOSSES)
        assert found.peak > LIMIT, "FSDP2 on the root alone fits"
        say(
            f"step 5: FSDP2 on the root alone: peak ≈{found.peak / MIB:.1f} MiB, too much for"
            f" {LIMIT / MIB:.2f}"
        )
        train_and_report(5, "FSDP2 on every unit", Sharded, stage=3, sends=3, exact=False)

    check_fsdp2()

# %% [markdown]
# ## Step 6: one norm, several micro-batches
#
# **Clipping** scales the gradient down if its norm is above a limit, and it means the norm of
# the *whole* gradient. A rank has a shard of it. Squares add up, norms do not: sum the squares
# of your shards, all-reduce the sum, and take the root. If each rank clipped by its own norm,
# the parts would be scaled by different factors, and nothing would complain.
#
# **Accumulation** runs several small batches before one step: a loss for each, divided by
# their number, so that the sum of the means is the mean. With DDP one leaves out the
# communication for all but the last (`no_sync`). FSDP2 can do that too,
# `model.set_requires_gradient_sync(False)`, but think of what that means: a gradient which is
# not reduced must be kept whole, $4\Psi$ bytes in place of $4\Psi/N$. On two ranks that does
# not fit here (on four it would). Let every micro-batch reduce its gradients.


# %%
def clip_gradients(gradients: Sequence[torch.Tensor], limit: float) -> float:
    """Scale the gradient, of which these are this rank's shards, to a norm of at most `limit`.

    Returns the norm before, the same on all ranks. As torch does, scales in place by
    limit / (norm + 1e-6) if that is below 1.
    """
    # >>> solution 6: one sum of squares over all ranks, its root, one factor
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
    """Leave the gradients of the mean loss over these rows; return that loss, detached.

    Runs as many micro-batches, of equal numbers of rows, one after the other.
    """
    # >>> solution 6: chunk the rows; for each chunk forward, its share of the loss, backward
    total = torch.zeros((), device=inputs.device, dtype=inputs.dtype)
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = mean_square(model(x), y) / micro_batches
        loss.backward()
        total += loss.detach()
    return total
    # <<< solution


# %%
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_sharded(
    model: Net, adam: torch.optim.Adam, batches: Sequence
) -> tuple[list[float], list[float]]:
    """Train with accumulation and clipping; return losses and gradient norms."""
    losses, norms = [], []
    for inputs, targets in batches:
        losses.append(mean_over_ranks(accumulate(model, inputs, targets, MICRO_BATCHES)))
        # the list must not outlive its line, or it would keep the old gradients in memory
        norms.append(clip_gradients([local(p.grad) for p in model.parameters()], CLIP))
        adam.step()
        adam.zero_grad()
    return losses, norms


if __name__ == "__main__":
    MAYBE = LIMIT if FIRST is not None else None  # the limit, where something fits

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
            msg=f"the norms are {in_row(norms)}, of one process {in_row(TRUE_NORMS)}",
        )
        say(
            f"step 6: {MICRO_BATCHES} micro-batches, clipped to {CLIP}: norms {in_row(norms)};"
            f" losses {in_row(losses)}"
        )

    check_clipping()

# %% [markdown]
# ## Step 7: a checkpoint for any number of ranks
#
# Training goes on for weeks, and tomorrow you may get other machines. Each rank writes its own
# shards (nobody could hold the whole), and a metadata file says which rows of which tensor lie
# where. A rank that loads reads the rows it needs from whichever files hold them. This is
# `torch.distributed.checkpoint`: `dcp.save(state, checkpoint_id=folder, process_group=group)`,
# and `dcp.load`, which fills a state that you have prepared, *in place*. The prepared state
# tells it which rows are wanted.
#
# `get_state_dict(model, adam)` gives two dictionaries, with names in place of numbers, also for
# Adam's moments. They belong into the checkpoint as much as the parameters: without them Adam
# starts anew, and the loss jumps. So does the step at which you stopped. After loading,
# `set_state_dict(model, adam, model_state_dict=…, optim_state_dict=…)` puts everything where
# it belongs. `group` is the group of the ranks that take part: with two of four ranks, the
# other two would be waited for.


# %%
def save(
    model: Net,
    adam: torch.optim.Adam,
    step: int,
    folder: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint of the ranks of the group: parameters, Adam's states, the step."""
    # >>> solution 7: get_state_dict, and dcp.save of a dictionary of all three
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
    """Fill a model and its Adam, sharded over the group, from a checkpoint; return the step."""
    # >>> solution 7: prepare the same dictionary, dcp.load into it, set_state_dict
    # hint: numbers are filled in, too: state["step"] has another value after dcp.load
    parameters, moments = get_state_dict(model, adam)
    state = {"model": parameters, "adam": moments, "step": 0}
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(model, adam, model_state_dict=parameters, optim_state_dict=moments)
    return state["step"]
    # <<< solution


# %% [markdown]
# The check trains two steps on all ranks and saves. Then as many ranks, two of them, and one
# load it into a model with other parameters, and compare every bit with what was saved. At last
# all ranks go on for two steps, and arrive where one process does.


# %%
def sharded_over(mesh: DeviceMesh, device: torch.device) -> tuple[Net, torch.optim.Adam]:
    """A model with parameters of its own, over the ranks of a mesh, and its Adam."""
    model = build_model(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    for module in [*model.units(), model]:
        fully_shard(module, mesh=mesh)
    return model, make_adam(list(model.parameters()))


def every_bit(model: nn.Module, adam: torch.optim.Adam) -> list[torch.Tensor]:
    """All parameters and all states of Adam, whole, on the CPU."""
    found = []
    for parameter in model.parameters():
        for tensor in (parameter.detach(), *adam.state[parameter].values()):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found.append(whole.cpu())
    return found


def shared_folder() -> Path:
    """A new folder, the same one on all ranks."""
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
                assert step == 2, f"{n} ranks loaded step {step}, it was 2"
                assert len(bits) == len(saved) and all(map(torch.equal, bits, saved)), (
                    f"what {n} ranks loaded is not what {world} saved"
                )
            loaded.append(n)
            if n == world:
                kept = model, adam
            dist.barrier()
        losses, _ = train_sharded(*kept, batches[2:])
        assert_losses(losses, CLIPPED_LOSSES[2:])
        files = len(list(folder.glob("*.distcp")))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        say(
            f"step 7: ranks {world}, files {files}; loaded by"
            f" {', '.join(map(str, loaded))}: equal bit for bit; went on: {in_row(losses)}"
        )

    check_checkpoint()

# %% [markdown]
# ## Step 8: a model that nobody could build
#
# So far every rank built the whole model and then gave most of it away. That takes $4\Psi$
# bytes, if only for a moment. A model of 70 billion parameters has no such moment. So build it
# on the **meta device**, where tensors have shapes and no memory; shard that; and then let
# `model.to_empty(device=…)` allocate, which now means this rank's shards alone. Their content
# is arbitrary: *every* value has to be written.
#
# Where from? A checkpoint, as in step 7; or an initialisation. `reset_parameters` on the shards
# will not do: with one seed every rank draws the same numbers for its own rows, and
# with different seeds the model depends on the number of ranks. Instead draw one whole layer
# at a time, the same on all ranks from one seed, and keep your rows of it. Then it is, bit for
# bit, the model of one process.


# %%
def my_rows(whole: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """This rank's rows of a tensor that is sharded as `parameter` is."""
    mesh = parameter.device_mesh
    rows = whole.detach().chunk(mesh.size())
    return rows[mesh.get_local_rank()] if mesh.get_local_rank() < len(rows) else whole[:0]


def build_sharded(device: torch.device) -> tuple[Net, torch.optim.Adam]:
    """The model that build_model makes, fully sharded, and its Adam; it is never whole here."""
    # >>> solution 8: Net() on the meta device, shard_model, to_empty
    # hint: with torch.device("meta"): whatever is built here has no memory
    with torch.device("meta"):
        model = Net()
    model, adam = shard_model(model)
    model.to_empty(device=device)
    # <<< solution
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # >>> solution 8: draw a whole nn.Linear like it, and write my rows into my shards
            # hint: module.in_features, module.out_features; my_rows(drawn, module.weight)
            # hint: parameter.to_local() is this rank's shard; copy_ into it under no_grad
            whole = nn.Linear(module.in_features, module.out_features)
            with torch.no_grad():
                for ours, drawn in zip(module.parameters(), whole.parameters(), strict=True):
                    ours.to_local().copy_(my_rows(drawn, ours))
            # <<< solution
    return model, adam


# %% [markdown]
# The check compares the bits, and what was in use at most: a shard of all, and one layer. Then
# everything you wrote runs together, under the limit.


# %%
if __name__ == "__main__":

    def check_meta() -> None:
        batches = my_batches(device)
        with Memory(device) as memory:
            model, adam = build_sharded(device)
        layer = 4 * 4 * HIDDEN * (HIDDEN + 1)  # bytes of a block's linear, with its bias
        bound = 4 * PSI // world + 4 * layer
        assert memory.peak <= bound, (
            f"building took {memory.peak:,} bytes, and {bound:,} are enough"
        )
        for ours, true in zip(model.parameters(), build_model().parameters(), strict=True):
            assert torch.equal(ours.full_tensor().cpu(), true.detach()), (
                "the parameters are not those of build_model"
            )
        say(
            f"step 8: built in ≈{memory.peak / MIB:.2f} MiB, whole it has {4 * PSI / MIB:.2f};"
            " equal bit for bit"
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
    os._exit(0)  # DTensor's caches hold meshes, and these their groups, to the very end

# %% [markdown]
# ## Where to go from here
#
# - Take 13 as `HIDDEN`, and 7 as `WIDTH`: no shard is a whole number of anything now. What
#   still holds to the byte, what does not, and why?
# - Let `Unit.gather` of one unit start the next unit's all-gather (`async_op=True`), as
#   `mini_fsdp.py` of chapter 04 does. By how much does the peak rise?
# - Set `model.set_requires_gradient_sync(False)` in `accumulate` for all but the last
#   micro-batch. Predict the peak, then measure it.
# - Give `fully_shard` a `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`. What does a rank
#   hold now, what does it send, and why are the losses no longer those of one process?
# - On four ranks, shard over pairs and replicate across them (a 2D mesh). Which formula holds?
