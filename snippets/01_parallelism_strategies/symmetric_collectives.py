"""Shows the tensors of all ranks before and after each collective without a root.

Rank r starts with the numbers 10r, 10r+1, 10r+2 and 10r+3, so that each number shows where it
comes from. Every rank passes the same kind of arguments and gets the same kind of result. The
sums over four ranks are 60, 64, 68 and 72. The collectives are all-gather, reduce-scatter,
all-reduce, all-to-all and barrier.
"""

import os
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist

N = 4


def numbers(rank: int, device: torch.device) -> torch.Tensor:
    return 10 * rank + torch.arange(N, device=device)


def all_gather(x: torch.Tensor) -> torch.Tensor:
    """Every rank gets one chunk from each rank, in the order of the ranks."""
    chunks = [torch.empty_like(x) for _ in range(N)]
    dist.all_gather(chunks, x)
    return torch.cat(chunks)


def reduce_scatter(x: torch.Tensor) -> torch.Tensor:
    """Rank r gets the sum of chunk r over all ranks."""
    chunks = list(x.chunk(N))
    total = torch.empty_like(chunks[0])
    dist.reduce_scatter(total, chunks, op=dist.ReduceOp.SUM)
    return total


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """Every rank gets the sum. It replaces the values of the tensor that the rank passed."""
    dist.all_reduce(x, op=dist.ReduceOp.SUM)
    return x


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """Chunk c of rank r becomes chunk r of rank c: the matrix of chunks is transposed."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def barrier(x: torch.Tensor) -> torch.Tensor:
    """No rank continues before all ranks have called it. It moves no data of the caller.

    Each rank writes a key before its call. The last rank calls the barrier late.
    """
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    keys = [f"rank {rank} calls the barrier" for rank in range(N)]
    if dist.get_rank() == N - 1:
        store.wait(keys[:-1])  # the other ranks are before their calls or in them
        time.sleep(0.5)
    store.set(keys[dist.get_rank()], "")
    dist.barrier()
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    assert store.check(keys)
    return x


def show(name: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Print on rank 0 the tensors of all ranks. An empty tensor is printed as a dash."""
    states: list = [None] * N
    dist.all_gather_object(states, (before.tolist(), after.tolist()))
    if dist.get_rank() == 0:
        print(f"{name:16}", *(f"{f'rank {r}':12}" for r in range(N - 1)), f"rank {N - 1}")
        for word, column in (("before", 0), ("after", 1)):
            cells = [" ".join(map(str, state[column])) or "–" for state in states]
            print(f"  {word:14}", *(f"{cell:12}" for cell in cells[:-1]), cells[-1])


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
    if int(os.environ.get("WORLD_SIZE", "0")) != N:
        sys.exit("this program needs: torchrun --nproc-per-node=4 symmetric_collectives.py")
    device = init_distributed()
    rank = dist.get_rank()
    expected = {
        all_gather: [0, 10, 20, 30],
        reduce_scatter: [60 + 4 * rank],
        all_reduce: [60, 64, 68, 72],
        all_to_all: [10 * r + rank for r in range(N)],
        barrier: numbers(rank, device).tolist(),
    }
    for operation, result in expected.items():
        before = numbers(rank, device)
        if operation is all_gather:  # one chunk is enough
            before = before[:1]
        name = "all_to_all_single" if operation is all_to_all else operation.__name__
        with mock.patch.object(dist, name, wraps=getattr(dist, name)) as call:
            after = operation(x := before.clone())
        assert call.call_count == 1 and after.tolist() == result
        assert operation is not all_reduce or x.equal(after)  # in place
        show(operation.__name__, before, after)
        if operation is not barrier:  # with every number twice, a chunk has two elements
            twice = operation(before.repeat_interleave(2))
            assert twice.equal(after.repeat_interleave(2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
