# %% [markdown]
# # Lab 02: build DDP from scratch, then use PyTorch's DDP
#
# In this lab you write your own `DistributedDataParallel` (DDP). In data-parallel training,
# every process keeps a complete copy of the model and reads its own part of the batch. Before
# the optimizer changes the parameters, the processes average their gradients, so that all
# copies of the model stay equal. You write this averaging three times, and each version removes
# a cost of the version before it. After that you use PyTorch's own DDP, and you will know what
# it does.
#
# One test decides whether a version is right. With every version, all ranks must reach the
# parameters that a single process reaches when it trains with the whole batch.
#
# | step | what you write |
# |---|---|
# | 1 | `init_distributed` joins the process group and chooses the device of this rank. |
# | 2 | `shard` gives each rank its own samples. |
# | 3 | `broadcast_state` copies the model of rank 0 to all ranks. |
# | 4 | `average_gradients` averages the gradients after the backward pass. |
# | 5 | `HookDDP` starts to average while the backward pass is still running. |
# | 6 | `make_buckets` and `BucketDDP` average many gradients with few messages. |
# | 7 | `AccumulatingDDP` and `accumulate` process a batch in several micro-batches. |
# | 8 | `wrap` and `accumulate_with_torch` do the same with PyTorch's DDP. |
#
# ## How to work on this lab
#
# You need a clone of the repository and its Python environment. The command
# `make test WHAT=labs` creates the environment, and you need it only once. The command
# `source .venv/bin/activate` makes `torchrun` available in your shell.
#
# You can run the finished lab on the CPU, or with one GPU per process:
#
#     torchrun --nproc-per-node=2 labs/lab02_ddp.py
#
# To solve the lab yourself, create a copy with blanks, run the copy, and have it graded:
#
#     python labs/start.py 02                    # creates my_labs/lab02_ddp.py
#     torchrun --nproc-per-node=2 my_labs/lab02_ddp.py
#     python labs/check.py my_labs/lab02_ddp.py  # grades it with 1, 2, 3 and 4 ranks
#
# The page of this lab in the book shows the finished lab, and it offers two downloads. The
# script is the finished lab. The notebook is the copy with blanks. The cells of the notebook
# write the copy to a file and start `torchrun`.
#
# Each of the eight steps has a text, one or more blanks for you to fill, and a check. The check
# prints what it has proved. Your copy runs up to the first blank, and there it prints one line
# that says what is missing. The long report below that line comes from `torchrun`, and you can
# ignore it. `check.py` grades each step separately and gives you a hint that fits your mistake.
# With `--step 2` it grades only step 2 and the steps that step 2 needs. With `--output` it also
# shows what the failing ranks printed. Plan two to three hours for the lab.

# %%
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # import it before init: a later import keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

# %% [markdown]
# ## The reference: one process with the whole batch
#
# The data set has 96 samples, and the model is so small that every parameter can be compared.
# One rule makes the comparison exact. Each training step reads the whole data set, so one step
# is one epoch. The samples can be distributed over the ranks in any way, and the batch of all
# ranks together is always the same.
#
# The model starts with a layer that has no parameters. It has two **buffers**, which are the
# mean and the standard deviation of the samples that the process saw when it built the model.
# A model that was built with a different seed therefore has different parameters *and*
# different buffers. Real ranks differ in the same way, until step 3 makes them equal.

# %%
SAMPLES, FEATURES, EPOCHS = 96, 8, 5
_generator = torch.Generator().manual_seed(2)
INPUTS = torch.randn(SAMPLES, FEATURES, generator=_generator)
TARGETS = INPUTS.sin().sum(dim=1, keepdim=True) + INPUTS[:, :1] * INPUTS[:, 1:2]


class Standardize(nn.Module):
    """Return (x - mean) / std. The statistics come from the samples `seen`."""

    def __init__(self, seen: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", seen.mean(dim=0))
        self.register_buffer("std", seen.std(dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def build_model(seed: int) -> nn.Module:
    """Build a model with 4,801 parameters in 6 tensors and with 2 buffers.

    The seed determines the parameters and the buffers.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        Standardize(torch.randn(32, FEATURES)),
        nn.Linear(FEATURES, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, 1),
    )


def mean_loss(model: nn.Module, samples: Sequence[int]) -> torch.Tensor:
    """Return the mean squared error over the samples with these indices."""
    device = next(model.parameters()).device
    x, y = INPUTS[list(samples)].to(device), TARGETS[list(samples)].to(device)
    return nn.functional.mse_loss(model(x), y)


def train(
    model: nn.Module,
    samples_of: Callable[[int], Sequence[int]],
    backward: Callable[[nn.Module, Sequence[int]], None],
) -> None:
    """Train for `EPOCHS` steps.

    `samples_of(epoch)` returns the samples that this process reads in an epoch.
    `backward(model, samples)` leaves the gradients in the model.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        backward(model, samples_of(epoch))
        optimizer.step()


def assert_equal_to_reference(model: nn.Module) -> None:
    """Raise an error unless the parameters equal those of the single-process run."""
    for ours, reference in zip(model.parameters(), REFERENCE.parameters(), strict=True):
        torch.testing.assert_close(
            ours.detach().cpu(),
            reference.detach(),
            rtol=1e-4,
            atol=1e-5,
            msg="the parameters are not those of a single process; check.py gives a hint",
        )


REFERENCE = build_model(seed=0)

# %% [markdown]
# ## Helper functions
#
# You do not need to read the next cell. `say` prints a line on rank 0 only. `stop_kindly` ends
# the program with one sentence at a blank, or when a check fails. The last lines refuse a wrong
# start of the program.
#
# Cells that begin with `if __name__ == "__main__":` run only when you start the file.
# `check.py` imports the file and calls the functions that you wrote. If you add code of your
# own, put it inside a function or inside such a cell.


# %%
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
        sys.exit("start this lab with: torchrun --nproc-per-node=2 lab02_ddp.py")
    if 24 % int(os.environ["WORLD_SIZE"]):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # only rank 0 prints the sentence, and then torchrun ends the others
        sys.exit(
            "the number of ranks must divide 24 (use 1, 2, 3, 4, 6 or 8), so that each rank"
            " can cut its part of the 96 samples into 4 equal micro-batches"
        )
    sys.excepthook = stop_kindly

# %% [markdown]
# ## Train the reference
#
# Now one process trains with all 96 samples. In steps 4 to 8, your parameters are compared with
# the parameters of this model.

# %%
if __name__ == "__main__":
    before = mean_loss(REFERENCE, range(SAMPLES)).item()
    train(
        REFERENCE,
        samples_of=lambda epoch: range(SAMPLES),
        backward=lambda model, samples: mean_loss(model, samples).backward(),
    )
    after = mean_loss(REFERENCE, range(SAMPLES)).item()
    say(f"reference: a single process reduces the loss from {before:.3f} to {after:.3f}")

# %% [markdown]
# ## Step 1: join the process group and choose the device
#
# **Why.** Processes can communicate only after they have joined a process group. Each process
# must also know which GPU it should use. `torchrun` starts $N$ copies of this file. For each
# copy, it sets environment variables that say which copy it is:
#
# | variable | meaning |
# |---|---|
# | `RANK` | the number of this process among all processes on all machines, from 0 to $N - 1$ |
# | `WORLD_SIZE` | $N$, the number of processes |
# | `LOCAL_RANK` | the number of this process among the processes on its own machine |
# | `LOCAL_WORLD_SIZE` | the number of processes on this machine |
# | `MASTER_ADDR`, `MASTER_PORT` | the address at which the processes find each other |
#
# **What to do.** Write `init_distributed`. The function `dist.init_process_group` reads all of
# these variables except the two local ones. You need the local ones to choose the GPU. On a
# machine with eight GPUs, the GPUs have the numbers 0 to 7. Rank 11 then runs on the second
# machine and must use GPU 3, because its *local* rank is 3. If two ranks use the same GPU, NCCL
# raises an error. (NCCL is the library that runs collectives between NVIDIA GPUs.) If a machine
# has fewer accelerators than processes, use the CPU and gloo, which is the library for
# collectives between CPUs. A process also has a **current device**, which is GPU 0 at the
# start. Some collectives use it, so make the GPU of this rank the current device.
#
# **Check.** The lab adds up the ranks of all processes with an all-reduce. The sum must be
# $N(N-1)/2$. `check.py` also pretends that your function runs on a machine with GPUs, and it
# looks at the device that each rank chooses.


# %%
def init_distributed() -> torch.device:
    """Join the process group that torchrun describes, and return the device of this rank."""
    # >>> solution 1: join the process group, and return the accelerator of this rank or the CPU
    # hint: torch.accelerator has is_available(), device_count() and current_accelerator().
    # hint: torch.accelerator.set_device_index(i) makes device i the current one.
    # hint: On the CPU, call dist.init_process_group("gloo").
    # hint: On an accelerator, call dist.init_process_group(device_id=device).
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        dist.init_process_group(device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    return device
    # <<< solution


# %%
if __name__ == "__main__":
    device = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()

    ranks = torch.tensor(float(rank), device=device)
    dist.all_reduce(ranks)
    assert ranks.item() == world * (world - 1) / 2, "the all-reduce did not add up all ranks"
    backend = dist.get_backend()
    say(f"step 1: an all-reduce works on {device.type} with {backend}; world size {world}")

# %% [markdown]
# ## Step 2: give each rank its own samples
#
# **Why.** If all ranks read the same samples, $N$ ranks do the work of one rank. So each rank
# must read its own samples, and all ranks together must read all samples. The order of the
# samples must change from epoch to epoch. A rank cannot see which samples the other ranks read.
# Every rank must therefore compute the same order by itself.
#
# Each rank must also get the same number of samples. A collective must be called by all ranks
# or by none. If one rank had one batch more than the others, its last all-reduce would never
# complete.
#
# **What to do.** Write `shard`, which works in three stages:
#
# 1. Seed a generator with the epoch and with nothing else, and shuffle all indices with it.
# 2. Each rank must get $\lceil n / N \rceil$ of the $n$ indices. If $N$ does not divide $n$,
#    append indices from the beginning of the list to its end. If $n$ is less than half of $N$,
#    repeat the whole list more than once.
# 3. Take every $N$-th index, and start at your own rank.
#
# `DistributedSampler` does the same.
#
# **Check.** The lab collects the indices of all ranks and checks these rules. It also prints
# whether your indices equal those of `DistributedSampler`. They do not have to be equal.
# `check.py` accepts every distribution of the samples that follows the rules.


# %%
def shard(length: int, rank: int, world: int, epoch: int) -> list[int]:
    """Return the indices below `length` that `rank` reads in `epoch`.

    Each rank gets ceil(length / world) indices. All ranks together read every index, and they
    repeat at most `world - 1` reads.
    """
    # >>> solution 2: shuffle with the epoch as seed, pad to a multiple of world, take a slice
    # hint: torch.randperm can use a torch.Generator, and manual_seed(n) seeds a generator.
    # hint: The modulo operator can repeat a list: order[i % length] exists for every i.
    # hint: A slice of a list can have a stride: letters[1::3] is every third element.
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(length, generator=generator).tolist()
    missing = math.ceil(length / world) * world - length
    order += [order[i % length] for i in range(missing)]
    return order[rank::world]
    # <<< solution


# %%
if __name__ == "__main__":
    for length in (SAMPLES, 4 * world + 1):
        mine = shard(length, rank, world, epoch=0)
        shards = [[] for _ in range(world)]
        dist.all_gather_object(shards, mine)
        indices = [index for each in shards for index in each]
        assert len({len(each) for each in shards}) == 1, "the ranks read different numbers"
        assert set(indices) == set(range(length)), "the ranks together do not read every sample"
        assert len(indices) - length < world, "more samples are read twice than needed"
        assert mine != shard(length, rank, world, epoch=1), "epoch 1 has the order of epoch 0"
        say(
            f"step 2: each rank reads {len(mine)} of {length} samples;"
            f" samples that are read twice: {len(indices) - length}"
        )
    sampler = DistributedSampler(range(SAMPLES), world, rank, shuffle=True, seed=0)
    sampler.set_epoch(3)
    same = list(sampler) == shard(SAMPLES, rank, world, epoch=3)
    say(f"step 2: the indices equal those of DistributedSampler: {'yes' if same else 'no'}")

# %% [markdown]
# ## Step 3: start from the same model
#
# **Why.** If all ranks have the same model, equal gradients keep the models equal. But equal
# gradients do not make different models equal, so all ranks must start from the same model.
# Frozen parameters take part in the forward pass, just like parameters that are trained. The
# same is true for buffers. If you forget a buffer, you get no error. Each rank then computes
# with a model that is slightly different from the models of the other ranks.
#
# **What to do.** Write `broadcast_state`. It must broadcast every parameter and every buffer of
# rank 0. A broadcast has a *source*, and all ranks must name the same rank as the source.
#
# **Check.** Each rank builds its model with its own rank as the seed. After the broadcast, the
# model must equal a model that was built with seed 0.


# %%
def broadcast_state(module: nn.Module) -> None:
    """Overwrite the parameters and buffers of every rank, in place, with those of rank 0."""
    # >>> solution 3: broadcast every parameter and every buffer from rank 0
    # hint: dist.broadcast writes in place. Pass tensor.detach(), so that autograd ignores it.
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    # <<< solution


# %%
if __name__ == "__main__":
    model = build_model(seed=rank).to(device)
    broadcast_state(model)
    for ours, reference in zip(
        model.state_dict().values(), build_model(seed=0).state_dict().values(), strict=True
    ):
        assert torch.equal(ours.cpu(), reference), "a tensor differs from the one of rank 0"
    say(f"step 3: on every rank, all {len(model.state_dict())} tensors equal those of rank 0")

# %% [markdown]
# ## Step 4: average the gradients
#
# **Why.** Rank $r$ reads the shard $S_r$ of the batch $S$, with $|S_r| = |S| / N$. Its loss is
# the *mean* over this shard. We write $\nabla \ell_i$ for the gradient of the loss of sample
# $i$. Then
#
# $$\frac{1}{N} \sum_{r=0}^{N-1} \frac{1}{|S_r|} \sum_{i \in S_r} \nabla \ell_i
#   = \frac{1}{|S|} \sum_{i \in S} \nabla \ell_i$$
#
# In words: the mean of the ranks' gradients is the gradient of the whole batch. With two ranks
# and 96 samples, each rank averages over 48 samples, and the mean of these two averages is the
# average over all 96 samples.
#
# **What to do.** Write `average_gradients`. An all-reduce gives every rank the sum of the
# gradients, and you must divide the sum by $N$. If you forget the division, you get no error,
# but the gradients are $N$ times too large. SGD then takes steps that are $N$ times too long.
# Adam cancels a constant factor. With Adam the mistake therefore stays hidden until you clip
# the gradients by their norm.
#
# A frozen parameter has no gradient on any rank: its `.grad` is `None`. Skip it.
#
# **Check.** The lab trains for all five epochs and compares every parameter with the reference.
# It also counts the all-reduces. There is one all-reduce for each of the six parameter tensors,
# and all six begin after the backward pass has ended. So the network is idle during the
# backward pass, and the computation waits during the all-reduces. Step 5 removes this cost.


# %%
def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks. Call this after the backward pass."""
    # >>> solution 4: all-reduce every gradient, and divide it by the world size
    # hint: Work in place: dist.all_reduce(parameter.grad), then parameter.grad /= ...
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    # <<< solution


# %%
@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """Yield a list that receives the number of bytes of each call of dist.all_reduce."""
    sizes, real = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = real


if __name__ == "__main__":

    def my_samples(epoch: int) -> list[int]:
        return shard(SAMPLES, rank, world, epoch)

    started_in_backward: list[int] = []  # the number of all-reduces, one entry for each step

    def backward_and_count(model: nn.Module, samples: Sequence[int]) -> None:
        before = len(sizes)
        mean_loss(model, samples).backward()
        started_in_backward.append(len(sizes) - before)

    def backward_then_average(model: nn.Module, samples: Sequence[int]) -> None:
        backward_and_count(model, samples)
        average_gradients(model)

    model = build_model(seed=rank).to(device)
    broadcast_state(model)
    with all_reduces() as sizes:
        train(model, my_samples, backward_then_average)
    assert_equal_to_reference(model)
    say(
        f"step 4: averaging gives the parameters of a single process;"
        f" each step has {len(sizes) // EPOCHS} all-reduces of {sum(sizes) // EPOCHS:,} bytes"
        f" in total, and {max(started_in_backward)} of them start during the backward pass"
    )

# %% [markdown]
# ## Step 5: start the all-reduces during the backward pass
#
# **Why.** The backward pass computes the gradients of the last layer first, and it does not
# change them again. Their all-reduce can therefore start immediately, while the backward pass
# works on the earlier layers. Communication and computation then overlap.
#
# Two functions make this possible:
#
# - `parameter.register_post_accumulate_grad_hook(f)` tells autograd to call `f(parameter)` as
#   soon as `parameter.grad` is complete.
# - `dist.all_reduce(tensor, async_op=True)` only starts the all-reduce, and returns a `Work`
#   object. Do not use the tensor until `work.wait()` has returned. If you read the tensor, you
#   may read an unfinished result. If you write to it, for example with a division, you have a
#   race with the all-reduce.
#
# **What to do.** Fill the three blanks of `HookDDP`. The hook starts the all-reduce and keeps
# the `Work` object. The training loop calls `finish` between the backward pass and the
# optimizer. `finish` waits for each all-reduce and divides each gradient. It must also clear
# the list of `Work` objects, because otherwise the next step would divide the gradients twice.
#
# **Check.** The lab trains again and compares the parameters with the reference. In every step,
# all six all-reduces must start before the backward pass ends.


# %%
class HookDDP(nn.Module):
    """Start the all-reduce of each gradient as soon as autograd has computed the gradient.

    Call `finish` after the backward pass.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.started: list[tuple[nn.Parameter, dist.Work]] = []
        broadcast_state(module)
        # >>> solution 5: register self.start as the hook of each parameter that is trained
        # hint: A parameter with requires_grad=False does not accept a hook.
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start)
        # <<< solution

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def start(self, parameter: nn.Parameter) -> None:
        """Start the all-reduce of a gradient. Autograd calls this when it is complete."""
        # >>> solution 5: start an asynchronous all-reduce of the gradient, and keep its Work
        self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        # <<< solution

    def finish(self) -> None:
        """Wait until every gradient is the mean over the ranks. Call this after backward."""
        # >>> solution 5: wait for each Work, divide its gradient, and clear the list
        for parameter, work in self.started:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.started.clear()
        # <<< solution


# %%
if __name__ == "__main__":

    def backward_and_finish(model: nn.Module, samples: Sequence[int]) -> None:
        backward_and_count(model, samples)
        model.finish()

    model = HookDDP(build_model(seed=rank).to(device))
    started_in_backward.clear()
    with all_reduces() as sizes:
        train(model, my_samples, backward_and_finish)
    assert_equal_to_reference(model)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    for count in started_in_backward:
        assert count == trained, f"{count} of {trained} all-reduces started in a backward pass"
    say(
        f"step 5: hooks give the parameters of a single process;"
        f" all {trained} all-reduces of each step start during the backward pass"
    )

# %% [markdown]
# ## Step 6: put gradients into buckets
#
# **Why.** Each all-reduce has a latency: a fixed time before the first byte moves. A large
# model has hundreds of small parameters, so it pays this latency hundreds of times. A
# **bucket** is one flat tensor that contains several gradients, one after the other. If you
# reduce buckets, you send the same number of bytes with far fewer all-reduces. The limit
# `bucket_bytes` decides how many gradients fit into a bucket.
#
# **What to do.** Write `make_buckets` and fill the blanks of `BucketDDP`. Three decisions
# determine whether buckets work.
#
# *Which parameters share a bucket?* The backward pass computes the gradients roughly in the
# reverse order of `module.parameters()`. Fill the buckets in this reverse order. Otherwise the
# first bucket is complete only when the backward pass ends.
#
# *How do you avoid copies?* Let `parameter.grad` be a view of the bucket. Autograd then adds
# directly into the bucket, and the optimizer reads directly from it. However,
# `optimizer.zero_grad()` sets the gradients to `None`, and the next backward pass then creates
# new tensors. The bucket would still contain the old numbers, and you would reduce those. So
# the hook must check whether the gradient is the view. If it is not, the hook copies the
# gradient into the view and sets `parameter.grad` to the view again.
#
# *How do all ranks use the same order?* Collectives are matched by the order of the calls, and
# not by a name. On another rank, the gradients may become ready in a different order. A branch
# in the model is enough for that. If rank 0 starts bucket 2 while rank 1 starts bucket 3, the
# ranks add tensors that do not belong together, or they hang. So launch the buckets
# strictly in the order of the list. A bucket that is complete too early waits for the buckets
# before it. PyTorch's DDP does the same.
#
# In this lab, all parameters have the same dtype and the same device. PyTorch's DDP makes
# separate buckets for each combination of dtype and device.
#
# **Check.** The lab trains again and compares the parameters with the reference. Each gradient
# must be a view of its bucket, and in every step, all buckets must be launched before the
# backward pass ends. The lab also prints the number of all-reduces in a step.


# %%
@dataclass(eq=False)  # compare by identity, because tensors have no single truth value
class Bucket:
    """A flat tensor with one view for the gradient of each parameter in the bucket."""

    flat: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    waiting: set[nn.Parameter] = field(default_factory=set)  # parameters without a gradient yet
    work: dist.Work | None = None  # the all-reduce, after it was launched


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Put the parameters into buckets, and begin with the last parameter.

    A bucket is closed if the next parameter would make it larger than `bucket_bytes`. A
    parameter that is larger than `bucket_bytes` gets a bucket of its own.
    """
    # >>> solution 6: group the reversed parameters by size, and make a flat tensor with views
    # hint: flat = torch.zeros(n, dtype=p.dtype, device=p.device)
    # hint: view = flat[offset : offset + p.numel()].view_as(p)
    groups: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        if not groups or parameter.nbytes > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room -= parameter.nbytes
    buckets = []
    for group in groups:
        sizes = [parameter.numel() for parameter in group]
        flat = torch.zeros(sum(sizes), dtype=group[0].dtype, device=group[0].device)
        pieces = zip(group, flat.split(sizes), strict=True)
        buckets.append(Bucket(flat, {p: piece.view_as(p) for p, piece in pieces}))
    return buckets
    # <<< solution


class BucketDDP(nn.Module):
    """Average the gradients bucket by bucket during the backward pass.

    Call `finish` after the backward pass.
    """

    def __init__(self, module: nn.Module, bucket_bytes: int = 25 * 2**20):
        super().__init__()
        self.module = module
        broadcast_state(module)
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = make_buckets(trained, bucket_bytes)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.begin()
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.on_gradient)

    def begin(self) -> None:
        """Prepare all buckets for the next backward pass."""
        self.launched = 0  # the number of launched buckets, and the index of the next bucket
        for bucket in self.buckets:
            bucket.waiting, bucket.work = set(bucket.views), None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Process a gradient. Autograd calls this when `parameter.grad` is complete."""
        self.keep_in_bucket(parameter)
        self.launch_in_order(parameter)

    def keep_in_bucket(self, parameter: nn.Parameter) -> None:
        """Make `parameter.grad` a view of its bucket, without losing its values."""
        # >>> solution 6: if the gradient is not the view, copy it there and set .grad to it
        # hint: Two tensors start at the same address if their data_ptr() is the same.
        view = self.bucket_of[parameter].views[parameter]
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        # <<< solution

    def launch_in_order(self, parameter: nn.Parameter) -> None:
        """Note that a gradient is ready, and launch complete buckets in list order."""
        # >>> solution 6: remove the parameter from `waiting`, then launch what is complete
        # hint: The next bucket is self.buckets[self.launched].
        # hint: A bucket is complete when its `waiting` is empty.
        # hint: One gradient can make it possible to launch several buckets.
        self.bucket_of[parameter].waiting.discard(parameter)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            bucket = self.buckets[self.launched]
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1
        # <<< solution

    def finish(self) -> None:
        """Wait until every gradient is the mean over the ranks. Call this after backward."""
        if self.launched < len(self.buckets):
            unlaunched = len(self.buckets) - self.launched
            missing = sum(len(bucket.waiting) for bucket in self.buckets)
            raise RuntimeError(
                f"{unlaunched} buckets not launched, {missing} gradients missing"
            )
        # >>> solution 6: wait for the work of each bucket, divide the bucket, then call begin
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
        self.begin()
        # <<< solution


# %% [markdown]
# `finish` raises an error if a parameter got no gradient, because the bucket of this parameter
# cannot be launched. PyTorch's DDP raises an error, too, but only in the next forward pass. Its
# message is `Expected to have finished reduction in the prior iteration`. It raises no error if
# you set `find_unused_parameters=True`.

# %%
BUCKET_BYTES = 16 * 1024

if __name__ == "__main__":
    model = BucketDDP(build_model(seed=rank).to(device), BUCKET_BYTES)
    started_in_backward.clear()
    with all_reduces() as sizes:
        train(model, my_samples, backward_and_finish)
    assert_equal_to_reference(model)
    for bucket in model.buckets:
        for parameter, view in bucket.views.items():
            assert parameter.grad.data_ptr() == view.data_ptr(), "a gradient is not the view"
    for count in started_in_backward:
        assert count == len(model.buckets), "a bucket was not launched during a backward pass"
    say(
        f"step 6: buckets give the parameters of a single process;"
        f" each step has {len(sizes) // EPOCHS} all-reduces of {sum(sizes) // EPOCHS:,} bytes"
        " in total"
    )

# %% [markdown]
# ## Step 7: accumulate gradients without communication
#
# **Why.** If a batch does not fit into memory, you split it into $K$ micro-batches, which go
# through the model one after the other. The backward pass *adds* to the gradients, so only the
# last of the $K$ backward passes must communicate. If every backward pass communicated, each
# rank would send $K$ times the bytes, and the result would be the same.
#
# **What to do.** First write `on_gradient` and `no_sync` of `AccumulatingDDP`. Inside
# `with ddp.no_sync():`, the hooks must keep the gradients in the buckets and launch nothing.
# When the program leaves this context, the previous behaviour must return, even if the program
# leaves it by an exception.
#
# Then write `accumulate`, and be careful with the loss. The loss of a micro-batch is a mean
# over $|S_r| / K$ samples, and the backward passes add the gradients of the $K$ losses. You
# must therefore divide each loss by $K$. Do not divide it by $N$, because `finish` already
# divides by $N$:
#
# $$\sum_{k=1}^{K} \frac{1}{K} \cdot \frac{1}{|S_r| / K} \sum_{i \in S_{r,k}} \nabla \ell_i
#   = \frac{1}{|S_r|} \sum_{i \in S_r} \nabla \ell_i$$
#
# In words: the sum of the divided gradients is the gradient of the mean over the shard. With 48
# samples per rank and $K = 4$, each micro-batch has 12 samples, and
# $\frac{1}{4} \cdot \frac{1}{12} = \frac{1}{48}$.
#
# **Check.** The lab trains with four micro-batches per step and compares the parameters with
# the reference. Each step must have only as many all-reduces as there are buckets.


# %%
class AccumulatingDDP(BucketDDP):
    """A BucketDDP that can accumulate gradients without communication."""

    sync = True

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Process a gradient. Autograd calls this in every micro-batch."""
        # >>> solution 7: always keep the gradient in its bucket, but launch only if self.sync
        self.keep_in_bucket(parameter)
        if self.sync:
            self.launch_in_order(parameter)
        # <<< solution

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Prevent all communication of the backward passes inside this context."""
        # >>> solution 7: set self.sync to False, yield, and always restore the previous value
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before
        # <<< solution


def accumulate(
    ddp: AccumulatingDDP,
    loss_of: Callable[[nn.Module, Sequence[int]], torch.Tensor],
    micro_batches: Sequence[Sequence[int]],
) -> None:
    """Leave in `ddp` the gradients of the mean loss over all micro-batches and ranks."""
    # >>> solution 7: run backward on each micro-batch, all but the last in no_sync, then finish
    # hint: Each loss is a mean over its micro-batch. Divide it by len(micro_batches).
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
    # <<< solution


# %%
MICRO_BATCHES = 4


def split(samples: Sequence[int]) -> list[Sequence[int]]:
    """Cut the samples of one step into `MICRO_BATCHES` equal parts."""
    size = len(samples) // MICRO_BATCHES
    return [samples[first : first + size] for first in range(0, len(samples), size)]


if __name__ == "__main__":
    model = AccumulatingDDP(build_model(seed=rank).to(device), BUCKET_BYTES)
    with all_reduces() as sizes:
        train(
            model,
            my_samples,
            lambda model, samples: accumulate(model, mean_loss, split(samples)),
        )
    assert_equal_to_reference(model)
    assert len(sizes) == EPOCHS * len(model.buckets), "backward communicated inside no_sync"
    say(
        f"step 7: {MICRO_BATCHES} micro-batches give the parameters of a single process;"
        f" each step still has {len(sizes) // EPOCHS} all-reduces"
    )

# %% [markdown]
# ## Step 8: use PyTorch's DistributedDataParallel
#
# **Why.** You have written everything that DDP does in an ordinary training loop. You can now
# use PyTorch's version, and you already know what its arguments mean:
#
# | argument | what it corresponds to in your code |
# |---|---|
# | `device_ids=[i]` | the GPU of this rank; on the CPU, pass `None` |
# | `bucket_cap_mb` | `bucket_bytes`, but in MiB; the default is 25 |
# | `gradient_as_bucket_view=True` | `keep_in_bucket` |
# | `forward_sync_buffers` | step 3 for buffers, repeated in the forward pass |
#
# Without `gradient_as_bucket_view=True`, DDP copies each gradient into its bucket and then back
# out again. The older name of `forward_sync_buffers` is `broadcast_buffers`.
#
# **What to do.** Write `wrap` and `accumulate_with_torch`. PyTorch's DDP differs from your
# version in three ways:
#
# - You do not call `finish`. DDP asks autograd to finish the averaging when the backward pass
#   ends.
# - The *forward pass* decides whether the next backward pass communicates. So the forward pass,
#   too, must be inside `no_sync()`. If only the backward pass is inside, DDP communicates every
#   time and reports no error.
# - The buckets change after the first step. The first step uses a single bucket and records the
#   order in which the gradients become ready. From the second step on, the buckets follow this
#   order. DDP closes a bucket *after* the parameter that reaches the limit. DDP therefore makes
#   two buckets here, and your version makes three.
#
# **Check.** The lab trains with four micro-batches per step and compares the parameters with
# the reference. In the last step, DDP must send as many bytes as your own buckets have. It
# sends more if a micro-batch before the last one communicates.


# %%
def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap `module`, which is on `device`, in PyTorch's DDP with gradients as bucket views."""
    # >>> solution 8: return a DistributedDataParallel whose gradients are views of its buckets
    return DistributedDataParallel(
        module,
        device_ids=None if device.type == "cpu" else [device.index],
        bucket_cap_mb=BUCKET_BYTES / 2**20,
        gradient_as_bucket_view=True,
    )
    # <<< solution


def accumulate_with_torch(
    ddp: DistributedDataParallel,
    loss_of: Callable[[nn.Module, Sequence[int]], torch.Tensor],
    micro_batches: Sequence[Sequence[int]],
) -> None:
    """Leave in `ddp` the gradients of the mean loss over all micro-batches and ranks."""
    # >>> solution 8: as in step 7, but with forward and backward in no_sync, and without finish
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    # <<< solution


# %% [markdown]
# PyTorch starts its all-reduces from C++, so `all_reduces()` cannot count them. A
# **communication hook** can count them, because DDP calls the hook once for each bucket that is
# ready. The hook below counts the bytes, and then it starts the all-reduce that DDP would have
# started without a hook.

# %%
if __name__ == "__main__":
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    buckets_sent: list[int] = []

    def count_buckets(
        state: None, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        buckets_sent.append(bucket.buffer().nbytes)
        return allreduce_hook(dist.group.WORLD, bucket)

    model = wrap(build_model(seed=rank).to(device), device)
    model.register_comm_hook(None, count_buckets)
    sent_by_step: list[list[int]] = []

    def torch_backward(model: nn.Module, samples: Sequence[int]) -> None:
        accumulate_with_torch(model, mean_loss, split(samples))
        sent_by_step.append(buckets_sent.copy())
        buckets_sent.clear()

    train(model, my_samples, torch_backward)
    assert_equal_to_reference(model)
    first, *_, last = sent_by_step
    assert sum(last) == sum(sizes) // EPOCHS, "a micro-batch before the last one communicated"
    say(
        f"step 8: PyTorch's DDP gives the parameters of a single process;"
        f" the first step has {len(first)} all-reduce,"
        f" the last step has {len(last)} all-reduces of {sum(last):,} bytes in total"
    )
    loss = mean_loss(model, range(SAMPLES)).item()
    say(f"all versions reach the parameters of a single process, with a loss of {loss:.3f}")
    del model  # a DDP model keeps a reference to the process group
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# Your `AccumulatingDDP` is a complete DDP for common models. PyTorch's DDP also covers cases
# that would not fit on this page: several dtypes, parameters that a step does not use, and
# gradients that need a copy in a different precision. Try these changes:
#
# - Set `BUCKET_BYTES` to 1, and then to 25 MiB. How many all-reduces does a step have, and how
#   many of them start before the backward pass ends?
# - Freeze the first `Linear`, and run the lab again. Which lines of the output change?
# - Give rank 1 a different learning rate. Which check notices it? Would a real training run
#   notice it?
