"""If ranks pass tensors of unequal size or dtype, a process aborts or the sums are wrong.

A collective assumes that all ranks pass tensors of equal size and dtype. gloo compares only
the length of a message. A message that is longer than expected aborts the process with
SIGABRT, in a thread where no `try` can catch it. A message of the right length is accepted,
and its bits are read as the dtype of the receiver. TORCH_DISTRIBUTED_DEBUG=DETAIL compares
size and dtype before anything is sent. NCCL compares nothing. The call may then time out, or
return wrong numbers.

    --case size    rank 1 has five numbers, and rank 0 has four (the last batch, for example)
    --case dtype   rank 1 has int32, and rank 0 has float32
    --fix          the sizes are exchanged first, all ranks pad to the largest size, and all
                   ranks use the same dtype
"""

import argparse
import faulthandler
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def gather_uneven(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-gather tensors of one dimension and any length, converted to float32."""
    n = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
    dist.all_gather(lengths, torch.tensor([len(x)]), group=group)
    longest = max(length.item() for length in lengths)
    padded = torch.zeros(longest)
    padded[: len(x)] = x
    rows = [torch.empty(longest) for _ in range(n)]
    dist.all_gather(rows, padded, group=group)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def difference(error: RuntimeError) -> str:
    """The difference that DETAIL reports, without the fingerprints of the two collectives."""
    _, found, rest = str(error).splitlines()[0].partition("Collectives differ")
    return found + rest or reason(error)  # without DETAIL, NCCL may report a time-out


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
    parser.add_argument("--case", choices=["size", "dtype"], default="size")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start this program with: torchrun --nproc-per-node=2 unequal_tensors.py")

    # The default group synchronizes the exit. The calls that may fail use a second group.
    init_with_limits()
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3))

    # --8<-- [start:traced]
    x = torch.full((5 if args.case == "size" and rank == 1 else 4,), 1.0 + rank)
    if args.case == "dtype" and rank == 1:
        x = x.int()
    failed, report = False, ""
    try:
        if args.fix:
            rows = gather_uneven(x, group)
            # Now rank 0 has more numbers, and integers. Each row is padded to exactly 7 floats.
            dtype = torch.int32 if rank == 0 else torch.float32
            other = gather_uneven(torch.full((7 - 4 * rank,), 1 + rank, dtype=dtype), group)
            assert [row.tolist() for row in other] == [[1.0] * 7, [2.0] * 3]
            assert all(row.untyped_storage().nbytes() == 7 * 4 for row in other)
            (mine,) = gather_uneven(x, dist.new_subgroups(1)[0])  # a group with one rank
            assert mine.equal(x)
            report = f"gathered {[row.tolist() for row in rows]}"
        else:
            dist.all_reduce(x, group=group)
            report = f"1.0 + 2 = {x[0].item():.8g}"
    except RuntimeError as error:
        failed = True
        report = f"{type(error).__name__}: {difference(error)}"
    # --8<-- [end:traced]

    reports: list = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        for r, line in enumerate(reports):
            print(f"rank {r}: {line}", flush=True)
    dist.barrier()
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
