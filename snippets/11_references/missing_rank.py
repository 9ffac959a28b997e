"""Two of four ranks do not arrive: a collective only times out, monitored_barrier names them.

The barrier uses messages between two ranks: each rank sends one to rank 0, and rank 0 answers.
It works only with gloo, so a job on NCCL makes a second group for it, as this program does on
GPUs: dist.new_group(backend="gloo").
"""

import faulthandler
import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ABSENT = (2, 3)


# --8<-- [start:result]
def result(what: str, group: dist.ProcessGroup) -> str:
    """Call a collective or a barrier, and return the first line of its error message."""
    short = timedelta(seconds=4)
    try:
        if what == "all_reduce":
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == dist.get_world_size(group)
        else:
            dist.monitored_barrier(group, timeout=short, wait_all_ranks=what.endswith("all"))
    except RuntimeError as error:
        return reason(error)
    return "all ranks arrived"


# --8<-- [end:result]


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


def reason(error: RuntimeError) -> str:
    """The first line of the message, without the prefix of gloo or NCCL in brackets."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
    return re.sub(r"ran for (\d+)", r"ran for ≈\1", message)  # NCCL measures this time


def main() -> None:
    init_with_limits()
    rank = dist.get_rank()
    everyone = dist.new_group(backend="gloo")
    assert result("all_reduce", dist.group.WORLD) == "all ranks arrived"
    assert result("monitored_barrier, wait for all", everyone) == "all ranks arrived"
    messages, groups = {}, []
    for what in ("all_reduce", "monitored_barrier", "monitored_barrier, wait for all"):
        dist.barrier()
        timeout = timedelta(seconds=4 if rank == 0 else 20)  # rank 0 must give up first
        backend = None if what == "all_reduce" else "gloo"  # None: as in the default group
        group = dist.new_group(timeout=timeout, backend=backend)  # unusable after a failure
        groups.append(group)
        dist.barrier()
        if rank in ABSENT:
            time.sleep(5)
        else:
            messages[what] = result(what, group)
    assert len(messages) == (0 if rank in ABSENT else 3)  # rank 1 makes all three calls
    if rank == 0:
        for what, message in messages.items():
            print(f"{what}:\n  {message}")
        assert re.search("Timed out|closed|timeout", messages["all_reduce"])
        assert "Rank 2 failed" in messages["monitored_barrier"]
        assert "Ranks 2, 3 failed" in messages["monitored_barrier, wait for all"]
    dist.barrier()
    for group in groups:  # since NCCL 2.31, destroying a group hangs if a rank has aborted it
        group.abort()
    dist.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) != 4:
        sys.exit("missing_rank.py needs 4 ranks, started by torchrun")
    torch.set_num_threads(1)
    main()
