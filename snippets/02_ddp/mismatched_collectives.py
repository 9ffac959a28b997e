"""A job hangs when a rank skips a collective or calls two in a different order; tools say why.

A collective ends when every rank has called it. If one rank does not call it, the other ranks
wait until the timeout of the group (30 minutes for gloo, and 10 if NCCL is named), and their
error message names no rank. With TORCH_DISTRIBUTED_DEBUG=DETAIL, PyTorch checks before each
collective that all ranks call the same one. monitored_barrier (gloo) names the missing rank.
Use one of these two tools at a time. On GPUs, the barrier runs in a second group with gloo.
NCCL does not compare calls, so --case order may also end with wrong numbers.

    --case skip     rank 1 finds NaN in its batch and skips both collectives
    --case order    rank 1 calls the broadcast before the all-reduce, the others after it
    --case same     the control: all ranks call the same collectives, and the step completes
    --monitored     a monitored_barrier before the collectives
    --fix           a rank with a bad batch calls the same collectives and contributes zero
"""

import argparse
import faulthandler
import os
import re
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist


def step(
    value: torch.Tensor, rate: torch.Tensor, group: dist.ProcessGroup, case: str
) -> torch.Tensor:
    """Average `value` over the ranks and broadcast the learning rate of rank 0."""
    deviates = dist.get_rank() == 1
    if deviates and case == "skip":
        return value  # rank 1 calls neither of the two collectives
    if deviates and case == "order":
        dist.broadcast(rate, src=0, group=group)
        dist.all_reduce(value, group=group)
    else:
        dist.all_reduce(value, group=group)
        dist.broadcast(rate, src=0, group=group)
    return value / dist.get_world_size()


def monitored_step(
    value: torch.Tensor,
    rate: torch.Tensor,
    group: dist.ProcessGroup,
    case: str,
    on_gloo: dist.ProcessGroup,
) -> torch.Tensor:
    """The same step, and before it a barrier that names the rank that does not come."""
    if dist.get_rank() == 1 and case == "skip":
        return value
    dist.monitored_barrier(on_gloo, timeout=timedelta(seconds=3))
    return step(value, rate, group, case)


def fixed_step(
    value: torch.Tensor, rate: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Average over the ranks whose batch is good. A rank with a bad batch adds zero."""
    good = ~value.isnan()
    total = torch.cat([value.where(good, 0.0), good.float()])
    dist.all_reduce(total, group=group)  # every rank calls it
    dist.broadcast(rate, src=0, group=group)
    return total[:4] / total[4:]


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["skip", "order", "same"], default="skip")
    parser.add_argument("--monitored", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.exit("mismatched_collectives.py needs 2 ranks or more, started by torchrun")

    # The default group is for an orderly end. The collectives that fail run in a second group
    # with a short timeout. It is shortest on rank 0, so that rank 0 always gives up first.
    device = init_with_limits()
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))
    on_gloo = group if device.type == "cpu" else dist.new_group(backend="gloo")
    barrier = dist.monitored_barrier = mock.Mock(wraps=dist.monitored_barrier)  # counts calls

    good = 2.0 + 3.0 * rank**2  # what a good batch of this rank gives: 2, 5, 14, …
    bad = rank == 1 and (args.fix or args.case == "skip")
    value = torch.full((4,), float("nan") if bad else good)
    rate = torch.full((4,), 0.5 + rank**2 * (-1.0) ** rank)  # 0.5, -0.5, 4.5, …
    failed = False
    # --8<-- [start:traced]
    try:
        if args.fix:
            value = fixed_step(value, rate, group)
        elif args.monitored:
            value = monitored_step(value, rate, group, args.case, on_gloo)
        else:
            value = step(value, rate, group, args.case)
    except RuntimeError as error:
        failed = True
        if rank == 0:
            print(f"rank 0: {type(error).__name__}: {reason(error)}", flush=True)
    else:
        if rank == 0:
            print(f"rank 0: mean of the good batches {value[0].item():g}", flush=True)

    completes = args.fix or args.case == "same"
    both_tools = args.monitored and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    if both_tools:
        pass  # on torch 2.13 the barrier changes the numbers that DETAIL compares: false alarm
    elif rank == 0 and (device.type == "cpu" or args.case != "order"):
        assert failed != completes  # NCCL may pair the all-reduce with the broadcast
    if completes and not both_tools:
        counted = [
            2.0 + 3.0 * r**2 for r in range(dist.get_world_size()) if r != 1 or not args.fix
        ]
        assert value.eq(sum(counted) / len(counted)).all()
        assert rate.eq(0.5).all()  # every rank has the rate of rank 0
    skips = rank == 1 and args.case == "skip"
    assert barrier.call_count == (args.monitored and not skips and not args.fix)
    if args.fix:  # the next batches are all good
        ranks = range(dist.get_world_size())
        value = fixed_step(torch.full((4,), good), rate, group)
        assert value.eq(sum(2.0 + 3.0 * r**2 for r in ranks) / len(ranks)).all()
    dist.barrier()  # rank 0 has printed before any rank exits with an error
    # --8<-- [end:traced]
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
