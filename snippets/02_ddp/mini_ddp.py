"""The whole of DistributedDataParallel in a hundred lines, equal to torch's.

`MiniDDP` broadcasts rank 0's parameters and buffers, packs gradients into flat buckets, and
all-reduces each bucket while backward computes the next; `backward()` returns when every
gradient is the mean over ranks. `--unused` leaves a layer out, to show what it says then.

The design follows "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(Li et al., VLDB 2020) and torch/csrc/distributed/c10d/reducer.cpp.
"""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, STEPS = 240, 5  # the batch of all ranks together; 1, 2, 3 and 4 divide it
MIB = 2**20


class Bucket:
    """One flat tensor, and in it a view for the gradient of each of its parameters."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        size = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(size, dtype=parameters[0].dtype, device=parameters[0].device)
        views = self.flat.split([p.numel() for p in parameters])
        self.views = {p: v.view_as(p) for p, v in zip(parameters, views, strict=True)}
        self.waiting = set(parameters)  # those whose gradient is still to come
        self.work: dist.Work | None = None  # the all-reduce, once launched


def fill_buckets(parameters: list[nn.Parameter], caps: list[int]) -> list[Bucket]:
    """Cut `parameters`, last one first, into buckets.

    A bucket is closed by the parameter which brings it to its cap (so it may be larger), or by
    a change of dtype or device, as it is one tensor. Bucket i has a cap of `caps[i]` bytes, and
    those beyond the list have its last entry. The order is a guess at the order in which
    gradients arrive; torch cuts its buckets anew after the first backward, when it knows.
    """
    groups: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        group = groups[-1]
        full = sum(p.nbytes for p in group) >= caps[min(len(groups), len(caps)) - 1]
        other = group and (group[0].dtype, group[0].device) != (
            parameter.dtype,
            parameter.device,
        )
        if full or other:
            groups.append([])
        groups[-1].append(parameter)
    return [Bucket(group) for group in groups if group]


class MiniDDP(nn.Module):
    """Wrap `module` so that `backward` leaves in `.grad` the mean over all ranks.

    Every parameter that requires a gradient must take part in every synchronised backward, and
    have a dense gradient. `bucket_cap_mb` and `first_bucket_mb` are in MiB. The first bucket is
    small, so that the link has something to carry early.
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
        self.group = process_group  # None stands for all ranks
        self.world_size = dist.get_world_size(self.group)
        self.synchronise = True
        self.broadcast([*module.parameters(), *module.buffers()])

        self.names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        caps = [int(first_bucket_mb * MIB), int(bucket_cap_mb * MIB)]
        self.buckets = fill_buckets(list(self.names), caps)
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
        self.launched = 0  # so many buckets are being reduced in this backward
        self.in_backward = False
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), group_src=0, group=self.group)

    def forward(self, *args: object, **kwargs: object) -> object:
        if self.synchronise and torch.is_grad_enabled():
            # BatchNorm's statistics: rank 0's win. (torch's DDP does this where the forward
            # before was a synchronised one.)
            self.broadcast(list(self.module.buffers()))
        return self.module(*args, **kwargs)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Autograd has finished this parameter's gradient: move it into its bucket."""
        if not self.synchronise:
            return  # it stays, and the next backward adds to it
        if not self.in_backward:
            self.in_backward = True
            # Autograd calls `finish` when this backward has computed everything.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

        # Divide first, then sum: a sum of fp16 gradients overflows sooner than their mean does,
        # and the division rides on the copy into the bucket, so it costs no pass over memory.
        bucket = self.bucket_of[parameter]
        view = bucket.views[parameter]
        if parameter.grad.data_ptr() == view.data_ptr():  # zero_grad(set_to_none=False)
            view.mul_(1 / self.world_size)
        else:
            torch.mul(parameter.grad, 1 / self.world_size, out=view)
            parameter.grad = view
        bucket.waiting.discard(parameter)

        # Collectives are matched by the order in which they are launched, and gradients may
        # come in another order on another rank. So a bucket which is full before its turn
        # waits, and all ranks launch bucket 0, 1, 2, …
        while self.launched < len(self.buckets) and not self.buckets[self.launched].waiting:
            bucket = self.buckets[self.launched]
            bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.launched += 1

    def finish(self) -> None:
        """The end of backward: wait for every bucket, and be ready for the next backward."""
        missing = [self.names[p] for bucket in self.buckets for p in bucket.waiting]
        for bucket in self.buckets[: self.launched]:
            bucket.work.wait()  # on a GPU the stream waits, Python goes on
        for bucket in self.buckets:
            bucket.waiting, bucket.work = set(bucket.parameters), None
        self.launched, self.in_backward = 0, False
        if missing:
            raise RuntimeError(
                f"no gradient in this backward for {', '.join(sorted(missing))}: use them in "
                "the loss, or freeze them with requires_grad_(False) before wrapping"
            )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally: the first backward after it averages their sum."""
        before, self.synchronise = self.synchronise, False
        try:
            yield
        finally:
            self.synchronise = before


class Network(nn.Module):
    """Layers defined in the order of their use, a buffer, and one layer to leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(()) + 1)
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))
        self.spare = nn.Linear(128, 128)
        self.use_spare = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x).relu()
        return self.spare(x) if self.use_spare else x


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


def train(model: nn.Module, rank: int, n: int, device: torch.device, accumulate: int) -> None:
    """Train on shard `rank` of `n`, in `accumulate` micro-batches per step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(1234)  # the same batches for everybody
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 128)
        micro_batches = inputs.chunk(n)[rank].to(device).chunk(accumulate)
        assert [len(x) for x in micro_batches] == [BATCH // n // accumulate] * accumulate
        optimizer.zero_grad(set_to_none=accumulate > 1)  # else they stay where they are
        for number, x in enumerate(micro_batches, start=1):
            wait = hasattr(model, "no_sync") and number < accumulate
            with model.no_sync() if wait else nullcontext():
                loss = nn.functional.mse_loss(model(x), x.tanh())
                (loss / accumulate).backward()
        optimizer.step()


def main() -> int:
    if BATCH % (2 * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"twice the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # on purpose: every rank starts from different weights
    model = Network().to(device)
    ours = MiniDDP(model, bucket_cap_mb=0.25, first_bucket_mb=0.0625)
    theirs = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=0.25)
    alone = copy.deepcopy(model)
    ours.module.scale += rank  # the first forward brings back that of rank 0

    if "--unused" in sys.argv:
        model.use_spare = False
        try:
            train(ours, rank, n, device, accumulate=1)
        except RuntimeError as error:
            if rank == 0:
                print(f"{type(error).__name__}: {error}", flush=True)
            dist.barrier()  # rank 0 has printed before any rank leaves with an error
            return 1

    sizes = [f"{bucket.flat.nbytes / 1024:.1f}" for bucket in ours.buckets]
    if rank == 0:
        print(f"{len(ours.names)} gradients in {len(sizes)} buckets of {', '.join(sizes)} KiB")
    for accumulate in (1, 2):
        train(ours, rank, n, device, accumulate)
        train(theirs, rank, n, device, accumulate)
        train(alone, 0, 1, device, accumulate=1)
        for a, b, c in zip(
            ours.parameters(), theirs.parameters(), alone.parameters(), strict=True
        ):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a, c)
        if rank == 0:
            print(
                f"world size {n}, micro-batches per step {accumulate}: "
                "MiniDDP = DistributedDataParallel = one process"
            )
    return 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
