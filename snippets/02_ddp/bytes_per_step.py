"""What one step of DDP sends: the program counts all collectives and the bytes on the sockets.

DDP all-reduces each gradient once. In fp32 these are 4Ψ bytes for Ψ parameters, however DDP
divides them into buckets. A ring all-reduce sends 2(N-1)/N times that from every rank, which is
less than 8Ψ bytes for any number of ranks N.

A dispatch mode counts the collectives that DDP calls. The operating system counts the bytes
that the process wrote to its sockets. In the output, compare the bytes that a ring sends with
the bytes that rank 0 sent.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20


class CountCollectives(TorchDispatchMode):
    """Count the calls of c10d operators, and the bytes of their tensors."""

    def __enter__(self) -> "CountCollectives":
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.rstrip("_")
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def bytes_written() -> int | None:
    """Return the bytes that this process has written, or None if they are not counted."""
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None  # NCCL can send bytes without write calls
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
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    ddp = DistributedDataParallel(model, bucket_cap_mb=4)
    inputs = torch.randn(8, 512, device=device)

    for step in range(1, 4):
        dist.barrier()
        written = bytes_written()
        with CountCollectives() as count:
            ddp(inputs).square().mean().backward()
        if written is not None:
            written = bytes_written() - written
        if rank == 0:
            counted = ", ".join(
                f"{calls} × {name}" for name, calls in sorted(count.calls.items())
            )
            print(
                f"step {step}: {counted}; all-reduced {count.bytes['allreduce'] / MIB:.2f} MiB"
            )
        assert count.bytes["allreduce"] == 4 * parameters

    if rank == 0:
        ring = 2 * (n - 1) / n * 4 * parameters
        print(f"4Ψ = 4 × {parameters:,} bytes = {4 * parameters / MIB:.2f} MiB")
        print(f"a ring sends 2(N-1)/N · 4Ψ = {ring / MIB:.2f} MiB per rank, N = {n}")
        if written is not None:
            # apart from the gradients, gloo sends only headers
            assert n == 1 or abs(written / ring - 1) < 0.01
            print(f"rank 0 sent ≈{written / MIB:.2f} MiB in step 3")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
