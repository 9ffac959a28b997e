# %% [markdown]
# # Lab 02: DDP from scratch, then torch's
#
# Data-parallel training keeps a whole copy of the model in every process, gives each process
# a part of the batch, and makes the gradients equal before the optimizer steps. In this lab
# you write that three times, each version without a cost of the one before it, and end with
# `torch.nn.parallel.DistributedDataParallel`, which you will then have no need to believe:
# all four must end at the parameters that one process reaches with the whole batch.
#
#     torchrun --nproc-per-node=2 labs/lab02_ddp.py
#
# runs the finished lab, on the CPU or on one GPU per process. To do it yourself:
#
#     python labs/start.py 02                    # writes my_labs/lab02_ddp.py, with blanks
#     torchrun --nproc-per-node=2 my_labs/lab02_ddp.py
#     python labs/check.py my_labs/lab02_ddp.py  # grades it at 1, 2, 3 and 4 ranks
#
# Work in a clone of the repository, with its Python: `make test WHAT=labs` sets it up once, and
# `source .venv/bin/activate` puts torchrun on the path. The script offered above is the
# finished lab, as is this page. The notebook is the copy with blanks: its cells write the file,
# and start torchrun.
#
# There are eight steps. Each has a text, one or more blanks for you to fill, and a check which
# prints what it proved. Your copy runs as far as the first blank and says in one line what
# belongs there; the report under that line is torchrun's. `check.py` grades every step by
# itself and gives a hint that fits the mistake; `--step 2` grades one step and those it builds
# on, `--output` shows what failing ranks printed. Allow two to three hours.

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
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


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
        sys.exit("start me with: torchrun --nproc-per-node=2 lab02_ddp.py")
    if 24 % int(os.environ["WORLD_SIZE"]):
        if os.environ["RANK"] != "0":
            time.sleep(60)  # one rank says it; torchrun then ends the others
        sys.exit("96 samples need 1, 2, 3, 4, 6 or 8 ranks to make 4 equal micro-batches each")
    sys.excepthook = stop_kindly

# %% [markdown]
# The cells under `if __name__ == "__main__":` run when you start the file. `check.py` imports
# the file and calls what you wrote, so keep code of your own inside functions or such cells.
#
# ## The truth: one process, the whole batch
#
# Ninety-six samples, a model small enough to compare every number of, and one rule that makes
# the comparison exact: a step reads the whole data set, so that one step is one epoch. However
# the samples are dealt out, the whole batch is then the same.
#
# The model begins with a layer that has no parameters but two **buffers**: the mean and the
# standard deviation of whatever samples the process saw when it was built. Built with another
# seed, a model differs in its parameters *and* in its buffers. That is the state in which
# real ranks wake up.

# %%
SAMPLES, FEATURES, EPOCHS = 96, 8, 5
_generator = torch.Generator().manual_seed(2)
INPUTS = torch.randn(SAMPLES, FEATURES, generator=_generator)
TARGETS = INPUTS.sin().sum(dim=1, keepdim=True) + INPUTS[:, :1] * INPUTS[:, 1:2]


class Standardize(nn.Module):
    """(x - mean) / std, with the statistics of the samples seen when the model was built."""

    def __init__(self, seen: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", seen.mean(dim=0))
        self.register_buffer("std", seen.std(dim=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def build_model(seed: int) -> nn.Module:
    """A model of 4,801 parameters in 6 tensors and of 2 buffers, all made from `seed`."""
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
    """The mean squared error over these samples."""
    device = next(model.parameters()).device
    x, y = INPUTS[list(samples)].to(device), TARGETS[list(samples)].to(device)
    return nn.functional.mse_loss(model(x), y)


def train(
    model: nn.Module,
    samples_of: Callable[[int], Sequence[int]],
    backward: Callable[[nn.Module, Sequence[int]], None],
) -> None:
    """Train for `EPOCHS` steps; `samples_of(epoch)` says which samples this process reads."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        backward(model, samples_of(epoch))
        optimizer.step()


def assert_equal_to_truth(model: nn.Module) -> None:
    """Fail unless the parameters are those that one process reached."""
    for ours, true in zip(model.parameters(), TRUTH.parameters(), strict=True):
        torch.testing.assert_close(
            ours.detach().cpu(),
            true.detach(),
            rtol=1e-4,
            atol=1e-5,
            msg="the parameters are not those of one process: check.py has a hint",
        )


TRUTH = build_model(seed=0)

if __name__ == "__main__":
    before = mean_loss(TRUTH, range(SAMPLES)).item()
    train(
        TRUTH,
        samples_of=lambda epoch: range(SAMPLES),
        backward=lambda model, samples: mean_loss(model, samples).backward(),
    )
    after = mean_loss(TRUTH, range(SAMPLES)).item()
    say(f"the truth: one process takes the loss from {before:.3f} to {after:.3f}")

# %% [markdown]
# ## Step 1: start the process group, pick the device
#
# `torchrun` starts $N$ copies of this file and tells each copy who it is through environment
# variables:
#
# | variable | meaning |
# |---|---|
# | `RANK` | this process, counted over all machines, 0 to $N - 1$ |
# | `WORLD_SIZE` | $N$, how many there are |
# | `LOCAL_RANK` | this process, counted on its own machine |
# | `LOCAL_WORLD_SIZE` | how many run on this machine |
# | `MASTER_ADDR`, `MASTER_PORT` | where the processes find each other |
#
# `dist.init_process_group` reads all of them but the local ones. Those are for you: a machine
# with eight GPUs numbers them 0 to 7, so rank 11 on the second such machine must use GPU 3,
# its *local* rank. NCCL, the library that carries collectives between NVIDIA GPUs, refuses
# two ranks on one GPU. If there are fewer accelerators than processes on this machine, use
# the CPU and its library, gloo.


# %%
def start() -> torch.device:
    """Join the process group that torchrun announced; return the device of this rank."""
    # >>> solution 1: init the process group and return this rank's device, or the CPU
    # hint: torch.accelerator.is_available(), .device_count(), .current_accelerator()
    # hint: dist.init_process_group("gloo") on the CPU; device_id=device on an accelerator
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
    device = start()
    rank, world = dist.get_rank(), dist.get_world_size()

    ranks = torch.tensor(float(rank), device=device)
    dist.all_reduce(ranks)
    assert ranks.item() == world * (world - 1) / 2, "an all-reduce must see every rank"
    backend = dist.get_backend()
    say(f"step 1: {world} ranks on {device.type} with {backend} have added up their ranks")

# %% [markdown]
# ## Step 2: deal out the samples
#
# Each rank must read its own samples, all ranks together must read all of them, and the order
# must change from epoch to epoch. No rank can see what the others read, so all must come to
# the same order by themselves: seed a generator with the epoch, and only the epoch. Then take
# every $N$-th index, beginning at your own rank.
#
# Collectives are called by all ranks or by none. If one rank had a batch more than the others,
# it would wait in its last all-reduce for ever. So every rank must get the same number,
# $\lceil n / N \rceil$; where $N$ does not divide $n$, lengthen the list by its own beginning.
# `DistributedSampler` does just this. The lab prints whether your indices are the same as its;
# `check.py` passes any other deal that keeps these rules.


# %%
def shard(length: int, rank: int, world: int, epoch: int) -> list[int]:
    """The indices below `length` which `rank` reads in `epoch`, ceil(length / world) of them.

    All ranks together read every index; at most `world - 1` indices are read twice.
    """
    # >>> solution 2: shuffle by the epoch alone, pad to a multiple of world, take your share
    # hint: torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    # hint: a list's slice takes a stride: order[first::stride]
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(length, generator=generator).tolist()
    missing = math.ceil(length / world) * world - length
    order += order[:missing]
    return order[rank::world]
    # <<< solution


# %%
if __name__ == "__main__":
    for length in (SAMPLES, 4 * world + 1):
        mine = shard(length, rank, world, epoch=0)
        shards = [[] for _ in range(world)]
        dist.all_gather_object(shards, mine)
        dealt = [index for other in shards for index in other]
        assert len({len(other) for other in shards}) == 1, "every rank must read as many"
        assert set(dealt) == set(range(length)), "all ranks together must read every sample"
        assert len(dealt) - length < world, "only the padding may be read twice"
        assert mine != shard(length, rank, world, epoch=1), "the next epoch needs a new order"
        say(
            f"step 2: {length} samples over {world} ranks: {len(mine)} each,"
            f" {len(dealt) - length} read twice"
        )
    sampler = DistributedSampler(range(SAMPLES), world, rank, shuffle=True, seed=0)
    sampler.set_epoch(3)
    same = list(sampler) == shard(SAMPLES, rank, world, epoch=3)
    say(f"step 2: the same indices as DistributedSampler: {'yes' if same else 'no'}")

# %% [markdown]
# ## Step 3: begin from the same model
#
# Equal gradients keep equal models equal; they do not make different models equal. So rank 0
# broadcasts its state before the first step. All of it: frozen parameters take part in the
# forward pass as much as trained ones, and so do buffers. A buffer left alone gives no error:
# every rank goes on computing, each with a model that is slightly its own.
#
# A broadcast names its *source*, and the source must be the same number on all ranks.


# %%
def broadcast_state(module: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place."""
    # >>> solution 3: broadcast every parameter and every buffer from rank 0
    # hint: dist.broadcast writes in place; autograd must not see it: pass tensor.detach()
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    # <<< solution


# %%
if __name__ == "__main__":
    model = build_model(seed=rank).to(device)
    broadcast_state(model)
    for ours, true in zip(
        model.state_dict().values(), build_model(seed=0).state_dict().values(), strict=True
    ):
        assert torch.equal(ours.cpu(), true), "after the broadcast a rank is not like rank 0"
    say(f"step 3: {len(model.state_dict())} tensors are rank 0's on every rank")

# %% [markdown]
# ## Step 4: average the gradients
#
# Rank $r$ reads the shard $S_r$ of the batch $S$, with $|S_r| = |S| / N$, and its loss is the
# *mean* over that shard. Then
#
# $$\frac{1}{N} \sum_{r=0}^{N-1} \frac{1}{|S_r|} \sum_{i \in S_r} \nabla \ell_i
#   = \frac{1}{|S|} \sum_{i \in S} \nabla \ell_i$$
#
# so the mean over the ranks of the gradients is the gradient of the whole batch. An all-reduce
# gives every rank the sum; the $1 / N$ is yours. Leave it out and nothing fails: you train
# with gradients $N$ times too large. SGD then takes steps $N$ times too long; Adam divides a
# constant factor out again, so there the mistake waits until you clip gradients by norm.
#
# A frozen parameter has no gradient (`.grad` is `None`) on any rank. Skip it.


# %%
def average_gradients(module: nn.Module) -> None:
    """Replace every gradient by its mean over the ranks. Call it after backward."""
    # >>> solution 4: all-reduce every gradient, then divide it by the world size
    # hint: in place: dist.all_reduce(parameter.grad), parameter.grad /= ...
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    # <<< solution


# %% [markdown]
# The check trains all five epochs and compares every parameter with those of one process. It
# also counts the all-reduces: one for each of the six parameter tensors, and every one of them
# begins after backward has ended, so that network and processor take turns at being idle.


# %%
@contextmanager
def all_reduces() -> Iterator[list[int]]:
    """Collect the bytes of each call of dist.all_reduce."""
    sizes, real = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        sizes.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield sizes
    finally:
        dist.all_reduce = real


def naive_backward(model: nn.Module, samples: Sequence[int]) -> None:
    mean_loss(model, samples).backward()
    average_gradients(model)


if __name__ == "__main__":

    def my_samples(epoch: int) -> list[int]:
        return shard(SAMPLES, rank, world, epoch)

    model = build_model(seed=rank).to(device)
    broadcast_state(model)
    with all_reduces() as sizes:
        train(model, my_samples, naive_backward)
    assert_equal_to_truth(model)
    say(
        f"step 4: naive: the parameters of one process;"
        f" per step {len(sizes) // EPOCHS} all-reduces of {sum(sizes) // EPOCHS:,} bytes,"
        " all after backward"
    )

# %% [markdown]
# ## Step 5: begin while backward still runs
#
# Backward computes the gradients of the last layer first, and from then on nobody changes
# them. Their all-reduce can start at once and run while backward works on the layers before.
# Two calls make this possible:
#
# - `parameter.register_post_accumulate_grad_hook(f)` has autograd call `f(parameter)` as soon
#   as `parameter.grad` is written.
# - `dist.all_reduce(tensor, async_op=True)` only starts the all-reduce, and returns a `Work`.
#   Until `work.wait()` has returned, the tensor belongs to the all-reduce: to read it gives
#   whatever is there so far, and to write to it (a division, say) is a race.
#
# So the hook starts and keeps the `Work`; `finish`, called between backward and the optimizer,
# waits and divides. It must also forget the `Work`s, or the next step would divide twice.


# %%
class HookDDP(nn.Module):
    """Start an all-reduce for each gradient as soon as backward has it; `finish` after it."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.started: list[tuple[nn.Parameter, dist.Work]] = []
        broadcast_state(module)
        # >>> solution 5: register self.start as the hook of each parameter that is trained
        # hint: a hook on a parameter with requires_grad=False is an error
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.start)
        # <<< solution

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def start(self, parameter: nn.Parameter) -> None:
        """Called by autograd: `parameter.grad` is complete on this rank."""
        # >>> solution 5: start an asynchronous all-reduce of the gradient, keep its Work
        self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))
        # <<< solution

    def finish(self) -> None:
        """Called after backward: wait until every gradient is the mean over the ranks."""
        # >>> solution 5: wait for each Work, divide its gradient, forget the Works
        for parameter, work in self.started:
            work.wait()
            parameter.grad /= dist.get_world_size()
        self.started.clear()
        # <<< solution


# %%
if __name__ == "__main__":
    model = HookDDP(build_model(seed=rank).to(device))
    early = []

    def hooked_backward(model: nn.Module, samples: Sequence[int]) -> None:
        mean_loss(model, samples).backward()
        early.append(len(sizes))
        model.finish()

    with all_reduces() as sizes:
        train(model, my_samples, hooked_backward)
    assert_equal_to_truth(model)
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    assert early[0] == trained, f"{early[0]} of {trained} began before backward ended"
    say(
        f"step 5: hooks: the parameters of one process;"
        f" {early[0]} all-reduces began before backward ended"
    )

# %% [markdown]
# ## Step 6: buckets
#
# Every all-reduce pays a latency before the first byte moves, and a large model has hundreds
# of small parameters. So put several gradients end to end in one flat tensor, a **bucket**,
# and reduce that: as few all-reduces as `bucket_bytes` allows, for the same bytes. Three
# matters decide whether it works.
#
# **Which parameters share a bucket.** Backward makes the gradients in about the reverse order
# of `module.parameters()`. Fill the buckets in that order, or the first bucket will only be
# complete when backward ends.
#
# **No copies.** If `parameter.grad` *is* a view into the bucket, autograd adds straight into
# it, and the optimizer reads straight from it. But `optimizer.zero_grad()` sets gradients to
# `None`, and then backward makes a fresh tensor. A bucket that was not told would go on
# reducing old numbers. So the hook looks: if the gradient is not the view, copy it into the
# view, and let `parameter.grad` be the view again.
#
# **The same order on every rank.** Collectives are matched by the order of calls, not by name.
# Gradients may be ready in another order on another rank (a branch in the model is enough),
# and if rank 0 starts bucket 2 while rank 1 starts bucket 3, they add what does not belong
# together, or wait for ever. So launch strictly in the order of the list: a bucket which is
# complete too early waits for the ones before it. torch's DDP does the same.
#
# All parameters here share one dtype and one device. Real DDP makes buckets for each pair.


# %%
@dataclass
class Bucket:
    """A flat tensor, and for each parameter in it the view that is to hold its gradient."""

    flat: torch.Tensor
    views: dict[nn.Parameter, torch.Tensor]
    waiting: set[nn.Parameter] = field(default_factory=set)  # not ready in this backward
    work: dist.Work | None = None


def make_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets with the parameters, last first.

    A bucket is closed when the next parameter would take it past `bucket_bytes`; a parameter
    larger than that has a bucket of its own.
    """
    # >>> solution 6: group the reversed parameters by size; a flat tensor and views for each
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
    """Reduce gradients bucket by bucket during backward; `finish` after it."""

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
        """Expect every gradient anew."""
        self.launched = 0  # how many buckets have been launched: the next one's place
        for bucket in self.buckets:
            bucket.waiting, bucket.work = set(bucket.views), None

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Called by autograd: `parameter.grad` is complete on this rank."""
        self.keep_in_bucket(parameter)
        self.launch_in_order(parameter)

    def keep_in_bucket(self, parameter: nn.Parameter) -> None:
        """Make `parameter.grad` the view in its bucket, whatever tensor it is now."""
        # >>> solution 6: unless the gradient is the view: copy it there and point .grad at it
        # hint: two tensors begin at the same address if their data_ptr() are equal
        view = self.bucket_of[parameter].views[parameter]
        if parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        # <<< solution

    def launch_in_order(self, parameter: nn.Parameter) -> None:
        """Note that the gradient is ready; launch the buckets that are due, in list order."""
        # >>> solution 6: cross the parameter off; while the next bucket is complete, launch it
        # hint: the next bucket is self.buckets[self.launched]; it is complete when its
        # hint: `waiting` is empty; one gradient can complete several buckets in a row
        self.bucket_of[parameter].waiting.discard(parameter)
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            bucket = self.buckets[self.launched]
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1
        # <<< solution

    def finish(self) -> None:
        """Called after backward: wait until every gradient is the mean over the ranks."""
        if self.launched < len(self.buckets):
            unlaunched = len(self.buckets) - self.launched
            missing = sum(len(bucket.waiting) for bucket in self.buckets)
            raise RuntimeError(
                f"{unlaunched} buckets not launched, {missing} gradients missing"
            )
        # >>> solution 6: wait for each bucket's work, divide the bucket; then expect anew
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
        self.begin()
        # <<< solution


# %% [markdown]
# `finish` raises if a parameter got no gradient, which would keep its bucket back. torch's DDP
# does so too, on the next forward, with `Expected to have finished reduction in the prior
# iteration`, unless you say `find_unused_parameters=True`.

# %%
BUCKET_BYTES = 16 * 1024

if __name__ == "__main__":
    model = BucketDDP(build_model(seed=rank).to(device), BUCKET_BYTES)
    early.clear()
    with all_reduces() as sizes:
        train(model, my_samples, hooked_backward)
    assert_equal_to_truth(model)
    for bucket in model.buckets:
        for parameter, view in bucket.views.items():
            assert parameter.grad.data_ptr() == view.data_ptr(), "a gradient is not the view"
    assert early[0] == len(model.buckets), "a bucket was not launched before backward ended"
    say(
        f"step 6: buckets: the parameters of one process;"
        f" per step {len(sizes) // EPOCHS} all-reduces of {sum(sizes) // EPOCHS:,} bytes"
    )

# %% [markdown]
# ## Step 7: accumulate, and be silent meanwhile
#
# A batch too large for memory goes through the model in $K$ micro-batches. Backward *adds* to
# the gradients, so only the last of the $K$ needs to communicate; the others would send
# $K - 1$ times the bytes for nothing. Inside `with ddp.no_sync():` the hooks keep gradients in
# the buckets and launch nothing. On leaving it, by an exception too, all is as before.
#
# The loss needs care as well. Each micro-batch's loss is a mean over $|S_r| / K$ samples, and
# their gradients are added, so each must be divided by $K$ (not by $N$: that division is in
# `finish`):
#
# $$\sum_{k=1}^{K} \frac{1}{K} \cdot \frac{1}{|S_r| / K} \sum_{i \in S_{r,k}} \nabla \ell_i
#   = \frac{1}{|S_r|} \sum_{i \in S_r} \nabla \ell_i$$


# %%
class AccumulatingDDP(BucketDDP):
    """BucketDDP with a context in which backward only adds up."""

    sync = True

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Called by autograd, in every micro-batch."""
        # >>> solution 7: keep the gradient in its bucket always; launch only if self.sync
        self.keep_in_bucket(parameter)
        if self.sync:
            self.launch_in_order(parameter)
        # <<< solution

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let no backward in this context communicate."""
        # >>> solution 7: switch self.sync off, yield, and restore it whatever happens
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
    # >>> solution 7: backward on each micro-batch, all but the last in no_sync; then finish
    # hint: every loss is a mean over its micro-batch: divide by len(micro_batches)
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
    assert_equal_to_truth(model)
    assert len(sizes) == EPOCHS * len(model.buckets), "no_sync must not communicate"
    say(
        f"step 7: {MICRO_BATCHES} micro-batches: the parameters of one process;"
        f" per step still {len(sizes) // EPOCHS} all-reduces"
    )

# %% [markdown]
# ## Step 8: torch's DistributedDataParallel
#
# You now know what it does, so its arguments explain themselves:
#
# | argument | your name for it |
# |---|---|
# | `device_ids=[i]` | the one GPU of this rank; `None` on the CPU |
# | `bucket_cap_mb` | `bucket_bytes`, in MiB; 25 by default |
# | `gradient_as_bucket_view=True` | `keep_in_bucket`; without it DDP also copies back out |
# | `forward_sync_buffers`, the older `broadcast_buffers` | step 3 for buffers, in forward |
#
# Three things differ from yours. There is no `finish`: DDP asks autograd to call it when
# backward ends. Whether a backward communicates is decided *in forward*: the forward pass too
# must lie within `no_sync()`. With only the backward inside, DDP communicates every time, and
# says nothing. And the buckets: the first step uses a single one, and notes in which order the
# gradients come; from the second step on the buckets follow that order. A bucket is closed
# *after* the parameter that takes it to its limit, so DDP makes two where you made three.


# %%
def wrap(module: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap `module`, which is on `device`, in torch's DDP, gradients being bucket views."""
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
    # >>> solution 8: as in step 7, with forward and backward in no_sync, and no finish
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
    # <<< solution


# %% [markdown]
# torch's all-reduces are started from C++, where `all_reduces()` does not see them. A
# **communication hook** does: DDP calls it once for each bucket that is ready. This one counts
# and then does what DDP would have done without it.

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
    assert_equal_to_truth(model)
    first, *_, last = sent_by_step
    assert sum(last) == sum(sizes) // EPOCHS, "no_sync must hold forward and backward"
    say(
        f"step 8: torch's DDP: the parameters of one process;"
        f" {len(first)} all-reduce in the first step, then {len(last)} of {sum(last):,} bytes"
    )
    loss = mean_loss(model, range(SAMPLES)).item()
    say(f"one process, naive, hooks, buckets, torch: one model, loss {loss:.3f}")
    del model  # a DDP model holds the group
    dist.destroy_process_group()

# %% [markdown]
# ## Where to go from here
#
# Your `AccumulatingDDP` is what DDP is, less the cases that do not fit on a page: several
# dtypes, parameters unused in a step, gradients that need a copy in another precision. Try:
#
# - Set `BUCKET_BYTES` to 1, then to 25 MiB. How many all-reduces, how many of them early?
# - Freeze the first `Linear`, and run again. Which lines change?
# - Give rank 1 another learning rate. Which check notices, and would a training run?
