"""All of DistributedDataParallel in a hundred lines, with the same result as PyTorch's version.

`MiniDDP` broadcasts the parameters and buffers of rank 0 and collects gradients in flat
buckets. It all-reduces each bucket while backward computes the next one. When `backward()`
returns, every gradient is the mean over all ranks.

The program trains a model with `MiniDDP`, with PyTorch's DDP, and in one process on the whole
batch, and compares the parameters. Odd ranks compute the two halves of the model in a different
order than even ranks. Their gradients are therefore ready in a different order, but all ranks
launch the buckets in the same order. `--unused` leaves a layer out and shows the error.

The design follows "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (Li
et al., VLDB 2020) and torch/csrc/distributed/c10d/reducer.cpp.
"""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partialmethod
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it
MIB = 2**20


class Bucket:
    """One flat tensor, with a view into it for the gradient of each parameter."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        views = self.flat.split([p.numel() for p in parameters])
        self.views = {p: v.view_as(p) for p, v in zip(parameters, views, strict=True)}
        self.waiting = set(parameters)  # their gradients are not ready yet
        self.work: dist.Work | None = None  # the all-reduce, once launched


def fill_buckets(parameters: list[nn.Parameter], caps: list[int]) -> list[Bucket]:
    """Distribute `parameters`, last one first, over buckets.

    Bucket i is complete when it has at least `caps[i]` bytes. The last entry of `caps` is also
    the cap of all later buckets. A change of dtype or device starts a new bucket, because a
    bucket is one tensor. The order is a guess at the order in which gradients become ready.
    PyTorch fills its buckets again after the first backward pass, when it knows this order.
    """
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        group = groups[-1]
        full = sum(p.nbytes for p in group) >= caps[min(len(groups), len(caps)) - 1]
        kind = parameter.dtype, parameter.device
        if full or (group and (group[0].dtype, group[0].device) != kind):
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups if group]


class MiniDDP(nn.Module):
    """Wrap `module`: after `backward`, each `.grad` is the mean over all ranks.

    Every parameter that requires a gradient must get a dense gradient in every backward pass
    outside `no_sync`. `bucket_cap_mb` and `first_bucket_mb` are in MiB. The first bucket is
    small, so that it is full early and the network starts early.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = process_group  # None means all ranks
        self.world_size = dist.get_world_size(self.group)
        self.synchronise = True
        self.broadcast([*module.parameters(), *module.buffers()])

        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        caps = [int(first_bucket_mb * MIB), int(bucket_cap_mb * MIB)]
        self.buckets = fill_buckets(list(self.names), caps)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched = 0  # the number of buckets launched in this backward pass
        self.in_backward = False
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.synchronise and torch.is_grad_enabled():
            # All ranks get the buffers of rank 0, for example the statistics of BatchNorm.
            # (PyTorch's DDP does this if the previous forward was outside `no_sync`.)
            self.broadcast(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Move a finished gradient into its bucket, and launch the buckets that are full."""
        if not self.synchronise:
            return  # the gradient stays in `.grad`, and the next backward adds to it
        if not self.in_backward:
            self.in_backward = True
            # Autograd calls `finish` when this backward pass has computed everything.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

        # Divide first, then sum: a sum of fp16 gradients overflows sooner than their mean.
        # The copy into the bucket divides too, so the division needs no extra pass over memory.
        bucket = self.bucket_of[parameter]
        view = bucket.views[parameter]
        if parameter.grad.data_ptr() == view.data_ptr():  # already in the bucket
            view.mul_(1 / self.world_size)
        else:
            torch.mul(parameter.grad, 1 / self.world_size, out=view)
            parameter.grad = view
        bucket.waiting.discard(parameter)
        self.launch_full_buckets()

    def launch_full_buckets(self) -> None:
        """Launch every bucket that is full and whose turn has come."""
        # The k-th all-reduce of a rank is combined with the k-th of every other rank, and the
        # gradients may be ready in a different order there. So a bucket that is full before
        # its turn waits, and every rank launches bucket 0, then 1, then 2, …
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            bucket = self.buckets[self.launched]
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.launched += 1

    def finish(self) -> None:
        """At the end of backward: wait for all buckets, then reset them."""
        missing = [self.names[p] for bucket in self.buckets for p in bucket.waiting]
        for bucket in self.buckets[: self.launched]:
            bucket.work.wait()  # on a GPU the stream waits, and Python continues
        for bucket in self.buckets:
            bucket.waiting, bucket.work = set(bucket.parameters), None
        self.launched, self.in_backward = 0, False
        if missing:
            raise RuntimeError(
                f"no gradient in this backward pass for {', '.join(sorted(missing))}: use them "
                "in the loss, or freeze them with requires_grad_(False) before wrapping"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of several micro-batches without communication.

        The first backward pass outside of `no_sync` averages their sum over the ranks.
        """
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before


def four_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)))


class Network(nn.Module):
    """Two branches, whose outputs are added, a buffer, and a layer that can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(()) + 1)
        self.left, self.right = four_layers(), four_layers()
        self.spare = nn.Linear(128, 128)
        self.use_spare, self.right_first = True, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.right_first:  # the same sum, but backward computes the branches in reverse
            right, left = self.right(x), self.left(x)
        else:
            left, right = self.left(x), self.right(x)
        return self.spare(left + right) if self.use_spare else left + right


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


def train(model: nn.Module, rank: int, n: int, device: torch.device, accumulate: int) -> None:
    """Train on shard `rank` of `n`, in `accumulate` micro-batches per step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(1234)  # the same batches on every rank and in one process
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 128)
        micro_batches = inputs.chunk(n)[rank].to(device).chunk(accumulate)
        assert [len(x) for x in micro_batches] == [BATCH // n // accumulate] * accumulate
        # with set_to_none=False, the gradients stay in their buckets: test both ways
        optimizer.zero_grad(set_to_none=accumulate > 1)
        for number, x in enumerate(micro_batches, start=1):
            local = hasattr(model, "no_sync") and number < accumulate
            # --8<-- [start:traced]
            with model.no_sync() if local else nullcontext():
                loss = nn.functional.mse_loss(model(x), x.tanh())
                (loss / accumulate).backward()
            # --8<-- [end:traced]
        optimizer.step()


def main() -> int:
    if BATCH % (2 * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"twice the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # on purpose: every rank starts with different parameters
    model = Network().to(device)
    model.right_first = rank % 2 == 1
    start = model.spare.weight.detach().clone()
    ours = MiniDDP(model, bucket_cap_mb=0.25, first_bucket_mb=0.0625)
    assert torch.equal(start, model.spare.weight) == (rank == 0)  # rank 0 keeps its weights
    theirs = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.25)
    reference = copy.deepcopy(model)  # trained by one process on the whole batch
    ours.module.scale += rank  # the first forward must restore the value of rank 0

    if "--unused" in sys.argv:
        model.use_spare = False
        try:
            train(ours, rank, n, device, accumulate=1)
        except RuntimeError as error:
            if rank == 0:
                print(f"{type(error).__name__}: {error}", flush=True)
            dist.barrier()  # rank 0 has printed before any rank exits
            return 1

    sizes = [f"{bucket.flat.nbytes / 1024:.1f}" for bucket in ours.buckets]
    if rank == 0:
        print(f"{len(ours.names)} gradients in {len(sizes)} buckets of {', '.join(sizes)} KiB")
    ready = []  # the bucket of each gradient, in the order in which the gradients are ready
    launched = []  # the number of all-reduces so far at that moment
    waits = mock.Mock(side_effect=dist.Work.wait)
    ours.register_forward_hook(lambda *_: waits.reset_mock())  # do not count its broadcast

    def record(parameter: nn.Parameter) -> None:
        ready.append(ours.buckets.index(ours.bucket_of[parameter]))
        launched.append(counter.call_count)
        assert not waits.called  # no hook waits for an all-reduce

    for parameter in ours.names:
        parameter.register_post_accumulate_grad_hook(record)
    # On odd ranks bucket 2 is full before bucket 1. It must wait until bucket 1 is launched.
    early, late = (2, 1) if model.right_first else (1, 2)
    first = [1] * 8 if model.right_first else [1] * 7 + [2]
    second = [1] * 7 + [3] if model.right_first else [2] * 7 + [3]
    for accumulate in (1, 2):
        ready.clear()
        launched.clear()
        with (
            mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter,
            mock.patch.object(dist.Work, "wait", partialmethod(waits)),
            mock.patch.object(dist.Work, "is_completed", partialmethod(waits)),
        ):
            train(ours, rank, n, device, accumulate)
            train(theirs, rank, n, device, accumulate)
            train(reference, 0, 1, device, accumulate=1)
        assert counter.call_count == 3 * STEPS  # only `ours` has called dist.all_reduce
        assert ready == ([0] * 2 + [early] * 8 + [late] * 8) * accumulate * STEPS
        in_step = [0] * 18 * (accumulate - 1) + [0, 1, *first, *second]  # no_sync sends nothing
        assert launched == [3 * step + count for step in range(STEPS) for count in in_step]
        assert waits.call_count == 3  # `finish` has waited for the buckets of the last backward
        for p, bucket in ours.bucket_of.items():  # the gradients are views into the buckets
            assert p.grad.data_ptr() == bucket.views[p].data_ptr()
        for a, b, c in zip(
            ours.parameters(), theirs.parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a, c)
        if rank == 0:
            print(
                f"world size {n}, micro-batches per step {accumulate}: "
                "MiniDDP = DistributedDataParallel = one process"
            )

    # A group of ranks, a frozen bias, and gradients that overflow if they are summed undivided
    group = [dist.new_group(list(range(parity, n, 2))) for parity in range(min(n, 2))][rank % 2]
    small = nn.Linear(1, 1).to(device)
    small.bias.requires_grad_(False)
    x = torch.full((1, 1), -3e38 if rank % 2 else 3e38, device=device)
    MiniDDP(small, process_group=group)(x).sum().backward()
    torch.testing.assert_close(small.weight.grad, x)

    kinds = torch.float32, torch.float64
    mixed = fill_buckets([nn.Parameter(torch.zeros(2, dtype=kind)) for kind in kinds], [MIB])
    assert [bucket.flat.dtype for bucket in mixed] == [torch.float64, torch.float32]
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
