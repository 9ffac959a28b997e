"""If one rank compiles longer than the timeout of the group, a healthy rank reports a time-out.

Every rank except the last one finds its compiled kernels in a cache. A sleep stands for the
compilation on the last rank. The timeout is 1 second here, where the default of NCCL is ten
minutes. After the warm-up, the step completes. Then the last rank must compile again, and the
same step in the same group times out. Look at which rank prints the message.
"""

import faulthandler
import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

LIMIT_S, COMPILE_S = 1, 2.5
compiled, all_reduces = False, 0


def compute(value: float) -> torch.Tensor:
    """Stands for a compiled function: the first call on the slow rank takes COMPILE_S."""
    global compiled
    if not compiled and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(COMPILE_S)
    compiled = True
    return torch.full((4,), value)


def step(group: dist.ProcessGroup) -> float:
    global all_reduces
    gradient = compute(dist.get_rank() + 1.0)
    all_reduces += 1
    dist.all_reduce(gradient, group=group)
    return gradient[0].item()


# --8<-- [start:warm_up]
def warm_up(patient: dist.ProcessGroup) -> None:
    """Compile on every rank before the first collective that has a short timeout."""
    compute(0.0)  # in a real run: forward, backward and evaluation, with the real shapes
    dist.barrier(group=patient)


# --8<-- [end:warm_up]


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
    global compiled
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("one_compiles_longer.py needs 2 ranks or more, started by torchrun")
    init_with_limits()
    report = print if dist.get_rank() == 0 else lambda *_: None
    patient = dist.new_group(timeout=timedelta(seconds=60))
    hasty = dist.new_group(timeout=timedelta(seconds=LIMIT_S))  # both steps use this group
    dist.barrier(group=patient)
    began = time.perf_counter()
    warm_up(patient)
    assert time.perf_counter() - began > LIMIT_S  # without `patient` it would time out
    total = step(hasty)
    report(f"after a warm-up: every rank has the sum {total:.0f}")
    assert total == sum(range(dist.get_world_size() + 1))

    compiled = False  # for example, the shape of the batch is new
    try:
        step(hasty)
    except RuntimeError as error:
        report(f"without a warm-up, rank 0: {type(error).__name__}: {reason(error)}")
    else:
        assert dist.get_rank() != 0, "rank 0 reported no time-out"
    assert all_reduces == 2  # the slow rank also called both, but the second one too late
    dist.barrier(group=patient)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
