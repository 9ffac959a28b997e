"""Two collectives in a different order give a wrong number, and no error is reported.

Collectives are matched only by their order. Rank 1 reduces the count before the loss, and the
other ranks reduce the loss before the count. With equal shapes and dtypes, the backend adds
a loss to a count. TORCH_DISTRIBUTED_DEBUG=DETAIL compares operation, shape and dtype. All three
are equal here, so it reports nothing. It reports the mistake if one of the three differs. The
numbers are chosen so that two ranks log equal wrong means. With three ranks, the means differ.

    (no flag)    equal shapes: no error, and a wrong mean
    --shapes     the count is a tensor of a different shape
    --fix        one all-reduce of both numbers, so that there is no order to get wrong
"""

import argparse
import faulthandler
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def reduce_both(loss: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum both over the ranks. Rank 1 uses the other order, as in a branch of a condition."""
    if dist.get_rank() == 1:
        dist.all_reduce(count, group=group)
        dist.all_reduce(loss, group=group)
    else:
        dist.all_reduce(loss, group=group)
        dist.all_reduce(count, group=group)


def reduce_packed(loss: torch.Tensor, count: torch.Tensor, group: dist.ProcessGroup) -> None:
    both = torch.cat([loss, count])
    dist.all_reduce(both, group=group)
    loss.copy_(both[:1])
    count.copy_(both[1:])


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) < 2:
        sys.exit("swapped_order.py needs 2 ranks or more, started by torchrun")

    # The default group synchronizes the exit. The calls that may fail use a second group.
    init_with_limits()
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))

    sums, samples = (5.0, 9.0) if rank == 1 else (3.0, 7.0)  # with two ranks, the mean is 0.5
    loss = torch.tensor([sums])
    count = torch.tensor([samples, samples] if args.shapes else [samples])
    failed, report = False, ""
    try:
        (reduce_packed if args.fix else reduce_both)(loss, count, group)
    except RuntimeError as error:
        failed = True
        if rank == 0:
            parts = str(error).splitlines()[0].split(".Collectives differ")
            print(f"RuntimeError: {parts[0].split('. Rank')[0]}")
            print(f"Collectives differ{parts[-1]}", flush=True)
    else:
        # The other ranks have loss 3 and count 7. The first call adds the count of rank 1.
        others = dist.get_world_size() - 1
        first, second = 3.0 * others + 9.0, 7.0 * others + 5.0
        swapped = (second, first) if rank == 1 else (first, second)
        right = (3.0 * others + 5.0, 7.0 * others + 9.0)
        assert (loss.item(), count.item()) == (right if args.fix else swapped)
        mean = round((loss / count).item(), 3)
        report = f"loss {loss.item()} / count {count.item()} = mean {mean}"
    reports = [""] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0 and not failed:
        for number, line in enumerate(reports):
            print(f"rank {number}: {line}", flush=True)
    dist.barrier()
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
