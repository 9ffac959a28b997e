"""ZeRO-2 from scratch: during backward, each bucket of gradients is sent to its owners.

As in ZeRO-1, every rank has all parameters, and Adam's state for one shard. But a bucket of
gradients is reduce-scattered as soon as backward has filled it, and then it is freed. A rank
keeps 1/N of the gradients. At its peak it also has one bucket twice: as gradients, and as the
flat copy that is sent.

Compare the last two lines of the output: the peak that the buckets recorded, and the sum of
these parts.
"""

import copy
import os
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn

BATCH, STEPS, H, LAYERS = 48, 5, 60, 12  # 1, 2, 3 and 4 ranks divide the batch
ELEMENT = 8  # bytes: float64, so that the order in which partial sums are added does not show


class Bucket:
    """Some parameters in one flat tensor. The rank keeps a shard of it and of its gradient."""

    def __init__(self, parameters: list[nn.Parameter], zero: "ZeRO2") -> None:
        self.zero, self.parameters = zero, parameters
        self.n, rank = dist.get_world_size(), dist.get_rank()
        flat = torch.cat([p.detach().flatten() for p in parameters])
        self.flat = torch.cat([flat, flat.new_zeros(-len(flat) % self.n)])  # padded
        start = 0
        for p in parameters:  # each becomes a view of the flat tensor
            p.data = self.flat[start : start + p.numel()].view_as(p)
            p.register_post_accumulate_grad_hook(self.ready)
            start += p.numel()
        self.shard = nn.Parameter(self.flat.chunk(self.n)[rank])  # also a view
        self.missing = len(parameters)

    def ready(self, parameter: nn.Parameter) -> None:
        """Count a finished gradient. After the last one of the bucket, reduce and free all."""
        self.zero.record(parameter.grad.nbytes)
        self.missing -= 1
        if self.missing == 0:
            self.missing = len(self.parameters)
            gradient = torch.zeros_like(self.flat)
            torch.cat(
                [p.grad.flatten() for p in self.parameters], out=gradient[: self.filled()]
            )
            self.zero.record(gradient.nbytes)
            for p in self.parameters:
                self.zero.record(-p.grad.nbytes)
                p.grad = None
            part = torch.empty_like(self.shard)
            dist.reduce_scatter(part, list(gradient.chunk(self.n)))
            part /= self.n
            if self.shard.grad is None:
                self.shard.grad = part
                self.zero.record(part.nbytes)
            else:  # add to the gradient of earlier micro-batches
                self.shard.grad += part
            self.zero.record(-gradient.nbytes)

    def filled(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def gather(self) -> None:
        dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach())


class ZeRO2:
    """The optimizer `kind(parameters, **options)`, with 1/N of its state and of the gradients.

    All ranks must begin with the same model, and `kind` must treat every element alone. A
    bucket has one dtype and about `capacity` bytes. In every backward pass, each parameter that
    requires a gradient must get a dense gradient.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        capacity: int,
        kind: type[torch.optim.Optimizer],
        **options: object,
    ) -> None:
        self.allocated = self.peak = 0  # bytes of gradients on this rank
        groups: list[list[nn.Parameter]] = []
        for p in reversed([p for p in parameters if p.requires_grad]):
            last = groups[-1] if groups else []
            if not last or p.dtype != last[0].dtype or sum(q.nbytes for q in last) >= capacity:
                groups.append([])
            groups[-1].append(p)
        self.buckets = [Bucket(group, self) for group in groups]
        self.optimizer = kind([bucket.shard for bucket in self.buckets], **options)

    def step(self) -> None:
        for bucket in self.buckets:
            if bucket.shard.grad is None or bucket.missing < len(bucket.parameters):
                raise RuntimeError("no gradient in this backward for some parameters")
        self.optimizer.step()
        for bucket in self.buckets:
            bucket.gather()
            bucket.shard.grad = None
        self.allocated = 0

    def record(self, nbytes: int) -> None:
        """Add the bytes of gradients that were allocated, or subtract those that were freed."""
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)


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


def check_uneven_bucket(device: torch.device) -> None:
    """Compare with one process: 25 or 30 elements in a bucket, and two micro-batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).to(device)
    ours = copy.deepcopy(alone)
    optimizer = ZeRO2(ours.parameters(), 20 * ELEMENT, torch.optim.SGD, lr=1.0)
    assert [bucket.filled() for bucket in optimizer.buckets] == [30, 25]
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=1.0)
    for _ in range(2):
        optimizer_alone.zero_grad()
        for _ in range(2):
            inputs = torch.randn(12, 4).to(device)
            ours(inputs[rank::n]).square().mean().backward()
            alone(inputs).square().mean().backward()
            # the storage is as small as the shard: a view would keep the whole gradient
            kept = [b.shard.grad.untyped_storage().nbytes() for b in optimizer.buckets]
            assert optimizer.allocated == sum(kept)
        optimizer.step()
        optimizer_alone.step()
    for parameter, truth in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, truth)


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    alone = nn.Sequential(*(nn.Linear(H, H) for _ in range(LAYERS))).to(device)
    ours = copy.deepcopy(alone)
    optimizer_alone = torch.optim.Adam(alone.parameters(), lr=0.01)
    layer = sum(p.nbytes for p in ours[0].parameters())
    optimizer = ZeRO2(ours.parameters(), layer, torch.optim.Adam, lr=0.01)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, H).to(device)
        mine = inputs[rank::n]
        loss = nn.functional.mse_loss(ours(mine), mine.sin())
        loss.backward()
        optimizer.step()
        optimizer_alone.zero_grad()
        whole = nn.functional.mse_loss(alone(inputs), inputs.sin())
        assert n == 1 or not torch.isclose(loss, whole)  # each rank has its own rows
        whole.backward()
        optimizer_alone.step()
    for parameter, truth in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, truth)

    check_uneven_bucket(device)
    assert all(p.grad is None for p in ours.parameters())  # freed, not zeroed
    sizes = [ELEMENT * bucket.filled() for bucket in optimizer.buckets]
    shards = [bucket.shard.nbytes for bucket in optimizer.buckets]
    first = optimizer.buckets[0].flat.nbytes  # padded
    expected = sum(shards[1:]) + sizes[0] + first  # the others are shards by then
    assert optimizer.peak == expected
    assert optimizer.allocated == 0  # every shard was used and freed
    if rank == 0:
        print(f"N = {n}, {LAYERS} buckets: equal to one process after {STEPS} steps of Adam")
        print(f"gradients, bytes: all {sum(sizes):,}, a shard of all {sum(shards):,}")
        print(f"peak of this rank: {optimizer.peak:,}")
        print(f"shards of {LAYERS - 1} buckets, and one bucket twice: {expected:,}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
