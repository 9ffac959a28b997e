"""Recommendation: an embedding table cut by rows or by columns, and a data-parallel MLP.

A sample is a bag of k ids, whose vectors are added, and some dense features. Each rank has its
own samples and a part of the table. If the table is cut by rows, each id is sent to the rank of
its row, which returns one partial sum for each sample. If it is cut by columns, every rank gets
all ids and returns its columns of every sum. The MLP uses DDP. Losses and weights equal those
of one process.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

B, K, D, V, DENSE, STEPS = 96, 40, 48, 12_000, 16, 3  # b of a rank; 1 to 4 ranks divide D and V


# --8<-- [start:exchange]
class Exchange(torch.autograd.Function):
    """Send part i of x [n, …] to rank i. In backward, gradients are sent back."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()  # the gradient of a sum is not contiguous
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient)


class MeanOfLosses(torch.autograd.Function):
    """Divide a shard's gradient by n: it is a sum over the losses of all ranks, not a mean."""

    @staticmethod
    def forward(ctx, shard):
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / dist.get_world_size()  # as DDP does for the MLP


# --8<-- [end:exchange]


# --8<-- [start:rows]
class ByRows(nn.Module):
    """Rank r keeps the rows r, r + n, r + 2n, … of the table: [V/n, d].

    Every rank has equally many samples.
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(self.part(table).clone())

    def part(self, table: torch.Tensor) -> torch.Tensor:
        return table[dist.get_rank() :: dist.get_world_size()]

    def send_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [b, k] -> the ids whose rows this rank has, and where the bags [n · b] begin."""
        n, b = dist.get_world_size(), len(ids)
        owner = ids % n
        lengths = torch.stack([(owner == r).sum(1) for r in range(n)])  # [n, b]
        received = torch.empty_like(lengths)
        dist.all_to_all_single(received, lengths)
        send, receive = lengths.sum(1).tolist(), received.sum(1).tolist()
        outgoing = torch.cat([ids[owner == r] for r in range(n)])  # sample by sample
        ours = outgoing.new_empty(sum(receive))
        dist.all_to_all_single(ours, outgoing, receive, send)
        return ours // n, received.view(n * b).cumsum(0) - received.view(n * b)

    def pool(self, ids: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
        """Return the whole sums of this rank's samples, [b, d]."""
        shard = MeanOfLosses.apply(self.shard)
        partial = F.embedding_bag(ids, shard, begin, mode="sum")  # [n · b, d]
        return Exchange.apply(partial.unflatten(0, (dist.get_world_size(), -1))).sum(0)


# --8<-- [end:rows]


# --8<-- [start:columns]
class ByColumns(nn.Module):
    """Rank r keeps the r-th block of columns of every row: [V, d/n].

    Every rank has equally many samples, and n divides d, or ValueError.
    """

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(self.part(table).clone())

    def part(self, table: torch.Tensor) -> torch.Tensor:
        n, d = dist.get_world_size(), table.shape[1]
        if d % n:
            raise ValueError(f"{n} ranks do not divide the {d} columns of the table")
        return table.chunk(n, dim=1)[dist.get_rank()]

    def send_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        """ids [b, k] -> those of all ranks, [n · b, k]."""
        everyone = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, ids)
        return (torch.cat(everyone),)

    def pool(self, ids: torch.Tensor) -> torch.Tensor:
        shard = MeanOfLosses.apply(self.shard)
        columns = F.embedding_bag(ids, shard, mode="sum")  # [n · b, d/n]
        columns = columns.unflatten(0, (dist.get_world_size(), -1))  # [n, b, d/n]
        return Exchange.apply(columns).transpose(0, 1).flatten(1)  # [b, d]


# --8<-- [end:columns]


class Whole(nn.Module):
    """The table on one rank, or a copy of it on each."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.shard = nn.Parameter(table.clone())

    def part(self, table: torch.Tensor) -> torch.Tensor:
        return table

    def send_ids(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (ids,)

    def pool(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding_bag(ids, self.shard, mode="sum")

    forward = pool  # DDP is called, and calls this


def make_mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D + DENSE, 64), nn.ReLU(), nn.Linear(64, 1))


def bytes_written() -> int | None:
    """Bytes that this process has passed to write calls, also of sockets, or None."""
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None  # NCCL does not send through the kernel
    return int(counters.read_text().split("wchar:")[1].split()[0])


# --8<-- [start:train]
def train(table: nn.Module, pool, mlp: nn.Module, batches: list) -> tuple[list, list, int]:
    """Losses of this rank's samples, and the bytes and lookups of the last step."""
    parameters = [table.shard, *mlp.parameters()]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    for ids, dense, clicked in batches:
        dist.barrier()
        marks = [bytes_written()]
        addressed = table.send_ids(ids)
        marks.append(bytes_written())
        sums = pool(*addressed) / K
        marks.append(bytes_written())
        logits = mlp(torch.cat([sums, dense], dim=1))[:, 0]
        loss = F.binary_cross_entropy_with_logits(logits, clicked)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        marks.append(bytes_written())
        losses.append(loss.detach())
    return losses, marks, addressed[0].numel()


# --8<-- [end:train]


def formulas(n: int, mlp: int) -> dict[str, tuple[float, float, float]]:
    """Bytes that a rank sends: ids, sums in forward, all gradients in backward."""
    dense = 2 * (n - 1) / n * mlp * 4
    rows, columns = (n - 1) * B * D * 4, (n - 1) / n * B * D * 4
    return {
        "by rows": ((n - 1) / n * B * K * 8 + (n - 1) * B * 8, rows, rows + dense),
        "by columns": ((n - 1) * B * K * 8, columns, columns + dense),
        "a copy each": (0, 0, 2 * (n - 1) / n * V * D * 4 + dense),
    }


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


def main() -> None:
    if D % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {D} columns")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    table = torch.randn(V, D)
    popular = 1 / torch.arange(1, V + 1)  # Zipf's law: a few ids are very frequent
    batches = [
        (
            torch.multinomial(popular, n * B * K, replacement=True).view(n * B, K),
            torch.randn(n * B, DENSE),
            torch.randint(2, (n * B,)).float(),
        )
        for _ in range(STEPS)
    ]
    everything = [tuple(x.to(device) for x in batch) for batch in batches]
    ours = [tuple(x.chunk(n)[rank] for x in batch) for batch in everything]
    alone, alone_mlp = Whole(table.to(device)), make_mlp().to(device)
    expected, *_ = train(alone, alone.pool, alone_mlp, everything)

    size = sum(p.numel() for p in alone_mlp.parameters())
    kib = 1024
    lines = [f"{n} ranks, {B} samples of {K} ids on each; a table of {V:,} × {D}"]
    lines += [
        "KiB that a rank sends       ids, counted     sums, counted     backward, counted"
    ]
    kinds = {"by rows": ByRows, "by columns": ByColumns, "a copy each": Whole}
    for name, formula in formulas(n, size).items():
        part, mlp = kinds[name](table.to(device)), make_mlp().to(device)
        pool = DistributedDataParallel(part) if name == "a copy each" else part.pool
        losses, marks, lookups = train(part, pool, DistributedDataParallel(mlp), ours)
        for mine, truth in zip(losses, expected, strict=True):
            dist.all_reduce(mine)
            torch.testing.assert_close(mine / n, truth)
        truths = (part.part(alone.shard), *alone_mlp.parameters())
        for mine, truth in zip((part.shard, *mlp.parameters()), truths, strict=True):
            torch.testing.assert_close(mine.detach(), truth.detach())
        told: list = [None] * n
        dist.all_gather_object(told, (marks, lookups))
        line = f"  {name:15}"
        for i, (theory, width) in enumerate(zip(formula, (13, 11, 15), strict=True)):
            line += f"{theory / kib:{width}.1f}"
            sent = [marks[i + 1] - marks[i] for marks, _ in told if marks[0] is not None]
            line += f"  ≈{sum(sent) / n / kib:.0f}" if sent else "  –"
            # headers and other output of a process are a few KiB
            assert not sent or abs(sum(sent) / n - theory) < 0.1 * theory + 2**14
        most, (rows, width) = max(lookups for _, lookups in told), part.shard.shape
        line += f"\n    keeps {rows:,} × {width}, {part.shard.nbytes / kib:,.0f} KiB"
        lines.append(f"{line}; at most {most:,} lookups of {width} numbers")
    if rank == 0:
        print("\n".join(lines))
        print("losses of 3 steps, table and MLP: equal to one process")
        ids = everything[-1][0].flatten()
        for name, owner in (("row i mod n", ids % n), ("n runs of rows", ids // (V // n))):
            busiest = owner.bincount(minlength=n).max() / len(ids)
            print(f"the busiest rank's share of all lookups, {name}: {busiest:.0%}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
