"""Shows the tensors of all ranks before and after each collective with a root.

Rank r starts with the numbers 10r, 10r+1, 10r+2 and 10r+3, so that each number shows where it
comes from. Each function calls one operation on all ranks and checks the result of this rank.
The first operation is send and recv, which is not a collective. The table has a column for each
rank, and a line before and after the operation.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist

N = 4
ROOT = 1


def numbers(rank: int, device: torch.device) -> torch.Tensor:
    return 10 * rank + torch.arange(N, device=device)


def send_and_recv(x: torch.Tensor) -> torch.Tensor:
    """Rank 0 sends to rank 3, and the other ranks call nothing. This is not a collective."""
    if dist.get_rank() == 0:
        dist.send(x, dst=3)
    elif dist.get_rank() == 3:
        dist.recv(x, src=0)
        assert x.tolist() == [0, 1, 2, 3]
    return x


def broadcast(x: torch.Tensor) -> torch.Tensor:
    """The tensor of the root overwrites the tensors of all other ranks."""
    dist.broadcast(x, src=ROOT)
    assert x.tolist() == [10, 11, 12, 13]
    return x


def scatter(x: torch.Tensor) -> torch.Tensor:
    """Rank r gets chunk r of the root. Only the root passes a list."""
    chunk = torch.empty_like(x[:1])
    dist.scatter(chunk, list(x.split(1)) if dist.get_rank() == ROOT else None, src=ROOT)
    assert chunk.item() == 10 * ROOT + dist.get_rank()
    return chunk


def gather(x: torch.Tensor) -> torch.Tensor:
    """The root gets one chunk from each rank. Only the root passes a list to fill."""
    chunks = [torch.empty_like(x) for _ in range(N)]
    dist.gather(x, chunks if dist.get_rank() == ROOT else None, dst=ROOT)
    if dist.get_rank() != ROOT:
        return x
    assert torch.cat(chunks).tolist() == [0, 10, 20, 30]
    return torch.cat(chunks)


def reduce(x: torch.Tensor) -> torch.Tensor:
    """The root gets the sum. The tensors of the other ranks are undefined afterwards."""
    dist.reduce(x, dst=ROOT, op=dist.ReduceOp.SUM)
    if dist.get_rank() != ROOT:
        return x[:0]
    assert x.tolist() == [60, 64, 68, 72]
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
        sys.exit("start this program with: torchrun --nproc-per-node=4 rooted_collectives.py")
    device = init_distributed()
    for operation in (send_and_recv, broadcast, scatter, gather, reduce):
        before = numbers(dist.get_rank(), device)
        if operation is gather:  # one chunk is enough
            before = before[:1]
        name = "send" if operation is send_and_recv else operation.__name__
        with mock.patch.object(dist, name, wraps=getattr(dist, name)) as call:
            after = operation(x := before.clone())
        assert call.call_count == (name != "send" or dist.get_rank() == 0)
        assert operation is not broadcast or x.equal(after)  # in place
        show(operation.__name__, before, after)
        if operation is reduce and device.type == "cpu":
            changed: list = [None] * N
            dist.all_gather_object(changed, not x.equal(before))
            # gloo has overwritten the tensor of at least one rank that is not the root
            assert any(changed[:ROOT] + changed[ROOT + 1 :])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
