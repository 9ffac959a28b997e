"""An all-reduce from send and recv sums a tensor over all ranks, in chunks around a ring.

Each rank sends 2(n-1)/n times the tensor. If the ranks themselves compute the sums, every
algorithm has at least one rank that sends this much (Patarasuk and Yuan, 2009). The program
counts the bytes that it passes to isend, and compares the result with the library's all-reduce.
With gloo on Linux, it also prints the bytes that each all-reduce has written to sockets.
"""

import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

MIB = 2**20
ELEMENTS = 3 * MIB  # 12 MiB of float32, divisible by 2, 3, 4 and 8 ranks


def ring_all_reduce(tensor: torch.Tensor) -> int:
    """Sum `tensor` over all ranks in place. Return the bytes that this rank sent.

    `tensor` is contiguous, and its length is a multiple of the world size.
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    incoming = torch.empty_like(chunks[0])
    sent = 0

    def pass_on(outgoing: torch.Tensor) -> None:
        nonlocal sent
        sent += outgoing.nbytes
        ops = [
            dist.P2POp(dist.isend, outgoing, (rank + 1) % n),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    # --8<-- [start:steps]
    # reduce-scatter: after n-1 steps, rank r has the finished sum of chunk r+1
    for step in range(n - 1):
        pass_on(chunks[(rank - step) % n])
        chunks[(rank - step - 1) % n].add_(incoming)

    # all-gather: the ranks send the finished chunks around the ring
    for step in range(n - 1):
        pass_on(chunks[(rank - step + 1) % n])
        chunks[(rank - step) % n].copy_(incoming)
    # --8<-- [end:steps]

    return sent


def bytes_written() -> int | None:
    """Bytes that this process has written, sockets included. None if they are not counted."""
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None  # NCCL does not send through write calls of the kernel
    return int(counters.read_text().split("wchar:")[1].split()[0])


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
    if ELEMENTS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {ELEMENTS:,}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    numbers = torch.arange(ELEMENTS, dtype=torch.float32, device=device) % 1000
    ours = numbers * (-2) ** rank
    reference = ours.clone()
    size = ours.nbytes

    begin = bytes_written()
    Path(os.devnull).write_bytes(bytes(MIB))
    assert begin is None or MIB <= bytes_written() - begin < 2 * MIB  # it counts writes

    dist.barrier()
    begin = bytes_written()
    with mock.patch.object(dist, "batch_isend_irecv", wraps=dist.batch_isend_irecv) as steps:
        sent = ring_all_reduce(ours)
        middle = bytes_written()
        dist.all_reduce(reference)
        end = bytes_written()

    # 2(n-1) steps, also after the library's all-reduce, and only the two neighbours take part
    peers = [op.peer for step in steps.call_args_list for op in step.args[0]]
    assert peers == [(rank + 1) % n, (rank - 1) % n] * (2 * (n - 1))
    assert sent == 2 * (n - 1) * size // n
    assert torch.equal(ours, numbers * sum((-2) ** r for r in range(n)))
    assert torch.equal(ours, reference)  # whole numbers below 2^24 are not rounded
    written = [] if begin is None else [middle - begin, end - middle]
    assert all(0.9 * sent <= count <= 1.1 * sent + MIB for count in written)  # with headers
    if rank == 0:
        theory = 2 * (n - 1) / n * size
        print(f"n = {n}, S = {size / MIB:.0f} MiB: equal to dist.all_reduce")
        print(f"  sent {sent / MIB:.0f} MiB, 2(n-1)/n · S = {theory / MIB:.0f} MiB")
        if written:
            ring, library = (count / MIB for count in written)
            print(f"  written to sockets: ring ≈{ring:.1f} MiB, library ≈{library:.1f} MiB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
