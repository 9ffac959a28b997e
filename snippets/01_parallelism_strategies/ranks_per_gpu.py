"""Which GPU each rank gets, with and without NCCL_MULTI_RANK_GPU_ENABLE=1.

Started with python, the program calls init_distributed() once for each rank of several machines
that do not exist: the number of GPUs is replaced, and no process group is created. Each row of
the table is one machine. Started with torchrun, the ranks join a real group, and each one
reports its device. Two operations then check that the group works: an all-reduce, and messages
between neighbours.
"""

import ctypes
import os
import sys
from collections import Counter
from unittest import mock

import torch
import torch.distributed as dist

MACHINES = [(0, 2), (1, 1), (1, 4), (2, 4), (4, 6), (4, 4), (8, 8), (4, 8)]  # GPUs, ranks


# --8<-- [start:init]
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


# --8<-- [end:init]


# --8<-- [start:version]
def nccl_version() -> tuple[int, int, int] | None:
    """Return the version of the NCCL library that this process uses; None if there is none.

    torch.cuda.nccl.version() is the version with which torch was compiled. That is a different
    one if you have installed a newer nvidia-nccl package.
    """
    code = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2")  # torch for CUDA has already loaded it
    except OSError:
        return None
    library.ncclGetVersion(ctypes.byref(code))
    return decode_version(code.value)


def decode_version(code: int) -> tuple[int, int, int]:
    """Return major, minor and patch version: (2, 30, 7) for 23007, (2, 8, 4) for 2804."""
    scale = 10_000 if code >= 10_000 else 1_000  # since 2.9, the minor version has two digits
    return code // scale, code % scale // 100, code % 100


# --8<-- [end:version]


def chosen_devices(gpus: int, ranks: int, variable: str | None) -> list[str]:
    """Return the device of each rank on a machine with this number of GPUs."""
    chosen = []
    for rank in range(ranks):
        calls = mock.Mock()  # records the calls of both functions in their order
        variables = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        if variable is not None:
            variables["NCCL_MULTI_RANK_GPU_ENABLE"] = variable
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.multiple(
                torch.accelerator,
                device_count=lambda: gpus,
                current_accelerator=lambda: torch.device("cuda"),
                set_device_index=calls.set_device_index,
            ),
            mock.patch.object(torch.backends.mps, "is_available", return_value=False),
            mock.patch.object(dist, "init_process_group", calls.init_process_group),
        ):
            device = init_distributed()
        expected = [mock.call.init_process_group("gloo")]
        if device.type != "cpu":  # the GPU becomes the current device before the group exists
            expected = [
                mock.call.set_device_index(device.index),
                mock.call.init_process_group(device_id=device),
            ]
        assert calls.mock_calls == expected, calls.mock_calls
        chosen.append(str(device))
    return chosen


def print_table() -> None:
    print("GPUs  ranks  by default                NCCL_MULTI_RANK_GPU_ENABLE=1")
    for gpus, ranks in MACHINES:
        os.environ.pop("NCCL_MULTI_RANK_GPU_ENABLE", None)
        alone, shared = (chosen_devices(gpus, ranks, value) for value in (None, "1"))
        assert chosen_devices(gpus, ranks, "0") == alone  # NCCL does not share with 0 either
        own = [f"cuda:{rank}" for rank in range(ranks)]
        assert alone == (own if gpus >= ranks else ["cpu"] * ranks)
        assert shared == alone or 0 < gpus < ranks
        if gpus:
            per_gpu = Counter(shared).values()
            assert len(per_gpu) == min(gpus, ranks) and max(per_gpu) - min(per_gpu) <= 1
        print(f"{gpus:4}  {ranks:5}  {summary(alone):24}  {summary(shared)}")


def summary(devices: list[str]) -> str:
    """Return how many ranks use each device: `4 ranks on 1 GPU`, or `1 rank on each GPU`."""
    if devices[0] == "cpu":
        return "all ranks on the CPU"
    counts = Counter(devices).values()
    different = sorted(set(counts))
    ranks = f"{' or '.join(map(str, different))} rank{'s' * (different != [1])}"
    return f"{ranks} on {len(counts)} GPU" if len(counts) == 1 else f"{ranks} on each GPU"


def check_group(device: torch.device) -> None:
    """Check an all-reduce and a ring exchange, and print the device of each rank on rank 0."""
    rank, n = dist.get_rank(), dist.get_world_size()
    total = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(total)
    assert (total == n * (n + 1) / 2).all(), "the all-reduce has a wrong sum"
    if n > 1:
        received = torch.empty(1000, device=device)
        sent = torch.full_like(received, float(rank))
        transfers = [
            dist.P2POp(dist.isend, sent, (rank + 1) % n),
            dist.P2POp(dist.irecv, received, (rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        assert (received == (rank - 1) % n).all(), "a message has arrived at the wrong rank"
    devices: list[str | None] = [None] * n
    dist.all_gather_object(devices, str(device))
    if rank == 0:
        library = dist.get_backend()
        if library == "nccl":
            library = "NCCL " + ".".join(map(str, nccl_version() or ()))
        ranks = f"{n} rank{'s' * (n > 1)}"
        print(f"{ranks} with {library}: {', '.join(devices)}; all results are right")


def main() -> None:
    assert decode_version(23007) == (2, 30, 7) and decode_version(2804) == (2, 8, 4)
    if "RANK" not in os.environ:
        print_table()
        return
    check_group(init_distributed())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
