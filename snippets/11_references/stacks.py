"""Finds the rank that causes a hang: faulthandler prints the stack of every rank after 3 s.

Rank 1 waits for a batch that never comes. The other ranks wait in an all-reduce, and a log
would show only their errors. The rank at fault is the one whose stack is different. With NCCL,
all_reduce waits for the GPU only because of TORCH_NCCL_BLOCKING_WAIT=1. By default it returns
at once, and a rank waits in the line that reads the result.
"""

import contextlib
import faulthandler
import os
import queue
import re
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def next_batch(batches: queue.Queue) -> torch.Tensor:
    return batches.get(timeout=8)  # in a real run: a lock, a file system, a dead worker


def average(gradient: torch.Tensor, group: dist.ProcessGroup) -> float:
    dist.all_reduce(gradient, group=group)
    return gradient[0].item() / dist.get_world_size()


def train(batches: queue.Queue, group: dist.ProcessGroup) -> None:
    for _ in range(3):
        assert average(next_batch(batches), group) == 1


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


def init_with_limits() -> torch.device:
    """Join the process group so that no wait is endless, also with NCCL. Return the device.

    With NCCL, a time-out raises an exception, as with gloo. TORCH_NCCL_BLOCKING_WAIT=0 restores
    the default of NCCL: a watchdog thread aborts the process. New tensors are on the device.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # a new group connects its ranks at once
    device = init_distributed()
    if device.type == "cuda":
        torch.set_default_device(device)
        # A call that blocks before its kernel starts has no timeout: print its line, and exit.
        faulthandler.dump_traceback_later(60, exit=True)
    return device


# --8<-- [start:main]
def main() -> None:
    init_with_limits()
    group = dist.new_group(timeout=timedelta(seconds=8))
    rank, n = dist.get_rank(), dist.get_world_size()
    batches: queue.Queue = queue.Queue()
    for _ in range(2 if rank == 1 else 3):
        batches.put(torch.ones(4))

    log = open(f"stack_{rank}.txt", "w")  # noqa: SIM115  faulthandler writes later
    faulthandler.dump_traceback_later(3, repeat=False, file=log)
    with contextlib.suppress(RuntimeError, queue.Empty):  # a log has only these
        train(batches, group)
    faulthandler.cancel_dump_traceback_later()
    assert batches.empty()  # the first two steps succeeded, also on rank 1
    Path(f"done_{rank}").touch()
    # --8<-- [end:main]
    if rank == 0:
        stacks = read_stacks(n)
        for number, frames in enumerate(stacks):
            print(f"rank {number}: {' < '.join(frames)}")
        print(f"a different stack than most ranks: rank {different(stacks)}")
        for first in range(n):  # rank 1 is found at every place in the list
            assert different(stacks[first:] + stacks[:first]) == [(1 - first) % n]
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    dist.destroy_process_group()


# --8<-- [start:read]
def read_stacks(n: int) -> list[list[str]]:
    """The stack of each main thread, innermost call first, without the standard library."""
    while not all(Path(f"done_{rank}").exists() for rank in range(n)):
        time.sleep(0.05)
    stacks = []
    for rank in range(n):
        text = Path(f"stack_{rank}.txt").read_text()
        main_thread = text.split("most recent call first):")[-1]
        frames = re.findall(r'File "(\S+)", line \d+ in (\w+|<module>)', main_thread)
        ours = [name for file, name in frames if file == __file__ or "distributed_c10d" in file]
        stacks.append(ours)
    return stacks


def different(stacks: list[list[str]]) -> list[int]:
    """The ranks whose stack is not the most frequent stack."""
    usual = max(stacks, key=stacks.count)
    return [rank for rank, frames in enumerate(stacks) if frames != usual]


# --8<-- [end:read]

if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) < 3:
        sys.exit("stacks.py needs 3 ranks or more, started by torchrun")
    torch.set_num_threads(1)
    main()
