"""ZeRO-2 from scratch: during backward, each bucket of gradients is sent to its owners.

As in ZeRO-1, every rank has all parameters, and Adam's state for one shard. But a bucket of
gradients is reduce-scattered as soon as backward has filled it, and then it is freed. A rank
keeps 1/N of the gradients. At its peak it also has one bucket twice: as gradients, and as the
flat copy that is sent.

Compare the last two lines of the output: the peak that the buckets recorded, and the sum of
these parts.
"""

import copy
import gc
import os
import sys
import time
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
                p.grad = None
                self.zero.record(-p.nbytes)
            part = torch.empty_like(self.shard)
            dist.reduce_scatter(part, list(gradient.chunk(self.n)))
            part /= self.n
            if self.shard.grad is None:
                self.shard.grad = part
                self.zero.record(part.nbytes)
            else:  # add to the gradient of earlier micro-batches
                self.shard.grad += part
            del gradient, part
            self.zero.record(-self.flat.nbytes)

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
            self.record(-bucket.shard.nbytes)

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


def leaf_bytes() -> int:
    """Return the bytes in memory of all leaf tensors that were made after gc.freeze()."""
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)]
    leaves = [x for x in tensors if x.is_leaf]
    leaves += [x.grad for x in leaves if x.grad is not None]
    storages = [x.untyped_storage() for x in leaves]  # a view keeps a whole storage in memory
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def assert_leaf_bytes(expected: int) -> None:
    end = time.monotonic() + 20
    while leaf_bytes() != expected:
        assert time.monotonic() < end, (leaf_bytes(), expected)
        time.sleep(0.001)  # gloo's threads free the buffers of a collective a bit late


class MeasuredZeRO2(ZeRO2):
    """Compare the recorded bytes with the tensors that exist, apart from the parameters."""

    def record(self, nbytes: int) -> None:
        super().record(nbytes)
        assert_leaf_bytes(self.allocated + sum(bucket.flat.nbytes for bucket in self.buckets))


def check_uneven_bucket(device: torch.device) -> None:
    """Compare with one process: 25 or 30 elements in a bucket, and two micro-batches."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5)).to(device)
    batches = list(torch.randn(4, 12, 4).to(device))
    shares, one = [inputs[rank::n] for inputs in batches], torch.ones((), device=device)
    gc.freeze()  # leaf_bytes does not count the tensors so far
    ours = copy.deepcopy(alone)
    optimizer = MeasuredZeRO2(ours.parameters(), 20 * ELEMENT, torch.optim.SGD, lr=1.0)
    assert [bucket.filled() for bucket in optimizer.buckets] == [30, 25]
    optimizer_alone = torch.optim.SGD(alone.parameters(), lr=1.0)
    with torch.autograd.profiler.profile() as trace:
        for number, inputs in enumerate(shares):
            ours(inputs).square().mean().backward(one)
            if number % 2:  # two micro-batches in a step
                optimizer.step()
    calls = [event.name for event in trace.function_events if event.name.startswith("c10d::")]
    assert sorted(calls) == 4 * ["c10d::allgather_"] + 8 * ["c10d::reduce_scatter_"]
    for number, inputs in enumerate(batches):
        alone(inputs).square().mean().backward()
        if number % 2:
            optimizer_alone.step()
            optimizer_alone.zero_grad()
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
        assert len(mine) == BATCH // n  # the mean gradient is right only if no row is missing
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
    states = [x for state in optimizer.optimizer.state.values() for x in state.values()]
    assert sum(x.nbytes for x in states if x.dim()) == 2 * sum(shards)  # Adam's moments
    if rank == 0:
        print(f"N = {n}, {LAYERS} buckets: equal to one process after {STEPS} steps of Adam")
        print(f"gradients, bytes: all {sum(sizes):,}, a shard of all {sum(shards):,}")
        print(f"peak of this rank: {optimizer.peak:,}")
        print(f"shards of {LAYERS - 1} buckets, and one bucket twice: {expected:,}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
