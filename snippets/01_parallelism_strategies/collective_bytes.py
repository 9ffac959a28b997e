"""Compares the bytes that each collective has to send with those that gloo really sends.

For an array of S bytes on n ranks the busiest rank has to send at least 2(n-1)/n·S in an
all-reduce, (n-1)/n·S in its halves and in an all-to-all, and S as the root of a broadcast. The
kernel of the operating system counts the bytes that each process wrote. CPU and Linux only.

gloo sends more in three cases. Its reduce_scatter runs one all-reduce for the chunk of each
rank, and each rank keeps only its own chunk. This sends the bytes of a whole all-reduce. The
root of its broadcast sends the whole tensor to log2(n) ranks. Its reduce sends a little more.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

MIB = 2**20
ELEMENTS = 3 * MIB  # 12 MiB of float32, divisible by 2, 3 and 4 ranks


def all_bytes_written() -> int:
    """Bytes that this process has passed to write calls, also of sockets."""
    return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])


def calls() -> dict[str, tuple]:
    """For each collective: the fraction of S that the busiest rank has to send, the call, the
    tensor with its result, and the value of each chunk of this result."""
    n, rank = dist.get_world_size(), dist.get_rank()
    place = torch.arange(n) + 1.0
    values = torch.outer(place**2, place)  # of each chunk, on each rank: [rank, chunk]
    whole = values[rank].repeat_interleave(ELEMENTS // n)
    total, own = values.sum(dim=0), values.diagonal()
    chunks = list(whole.chunk(n))
    mine, received = chunks[rank].clone(), torch.empty_like(whole)
    gathered = chunks if rank == 0 else None
    share = (n - 1) / n
    return {
        "all_reduce": (2 * share, lambda: dist.all_reduce(whole), whole, total),
        "reduce_scatter": (share, lambda: dist.reduce_scatter(mine, chunks), mine, total[rank]),
        "all_gather": (share, lambda: dist.all_gather(chunks, mine), whole, own),
        "all_to_all": (
            share, lambda: dist.all_to_all_single(received, whole), received, values[:, rank]
        ),
        "broadcast": (1, lambda: dist.broadcast(whole, src=0), whole, values[0]),
        "reduce": (1, lambda: dist.reduce(whole, dst=0), whole, total),
        "scatter": (share, lambda: dist.scatter(mine, gathered, src=0), mine, values[0, rank]),
        "gather": (1 / n, lambda: dist.gather(mine, gathered, dst=0), whole, own),
    }  # fmt: skip


def main() -> None:
    if not Path("/proc/self/io").exists():
        sys.exit("collective_bytes.py reads /proc/self/io, which this system does not have")
    if os.environ.get("WORLD_SIZE") not in ("2", "3", "4"):
        sys.exit("start 2, 3 or 4 ranks: torchrun --nproc-per-node=4 collective_bytes.py")
    dist.init_process_group("gloo")
    size, n = 4 * ELEMENTS, dist.get_world_size()
    if dist.get_rank() == 0:
        print(f"n = {n}, S = {size // MIB} MiB; MiB sent by the busiest rank, by all ranks")

    for name in calls():
        share, call, result, expected = calls()[name]
        dist.barrier()
        before = all_bytes_written()
        call()
        sent = torch.tensor(all_bytes_written() - before)
        if name not in ("reduce", "gather") or dist.get_rank() == 0:
            right = result.view(expected.numel(), -1) == expected.view(-1, 1)
            assert right.all(), f"{name} has a wrong result"
        each = [torch.empty_like(sent) for _ in range(n)]
        dist.all_gather(each, sent)
        busiest, total = max(each).item() / MIB, sum(each).item() / MIB
        least = share * size / MIB
        assert busiest >= least, f"{name} sent less than it has to"
        if dist.get_rank() == 0:
            print(
                f"{name:14}  at least {least:4.1f}, gloo {busiest:4.1f}; all ranks {total:.1f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
