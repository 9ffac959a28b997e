"""all_to_all_single with split sizes that disagree: an exception, an abort, or wrong data.

The sender and the receiver both give the size of each part, and no check compares the two. In
expert parallelism the sizes come from the router, so one old count is enough for a mistake. If
the two numbers of one rank differ, that rank raises an error. If a message is longer than
expected, the process is aborted. If it is shorter, no error is raised, and the end of the
buffer keeps its old contents, -1 in this program. These are the checks of gloo. NCCL does not
compare the counts, and may end with a time-out or with wrong data.

    --case own      what a rank sends to itself is not what it expects from itself
    --case long     it expects fewer rows from the other rank than come
    --case short    it expects more
    --fix           the counts are exchanged first, in two exchanges with different counts
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

H = 4


def exchange_counts(send: list[int]) -> list[int]:
    """How many rows every rank is about to send us."""
    outgoing = torch.tensor(send)
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    return incoming.tolist()


def rows_of(rank: int, count: int) -> torch.Tensor:
    """The rows of a rank, [count, H]. Each contains the rank and the number of the row."""
    return torch.tensor([[rank, *[row] * (H - 1)] for row in range(count)]).float()


def arriving(sends: list[list[int]], rank: int) -> torch.Tensor:
    """The rows that must arrive at a rank, sorted by their senders."""
    parts = [rows_of(r, sum(counts)).split(counts)[rank] for r, counts in enumerate(sends)]
    return torch.cat(parts)


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
    parser.add_argument("--case", choices=["own", "long", "short"], default="own")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) != 2:
        sys.exit("the case is for 2 ranks: torchrun --nproc-per-node=2 split_sizes.py")
    init_with_limits()
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=20))  # for the call that may fail
    exchange = dist.all_to_all_single = mock.Mock(wraps=dist.all_to_all_single)  # counts calls

    sends = [[3, 5], [2, 6]]  # what the router decided, so [3, 2] and [5, 6] will come
    wrong = {
        "own": [[4, 4], [4, 4]],  # what an even router would send
        "long": [[3, 1], [5, 6]],  # rank 0 expects too little
        "short": [[3, 4], [7, 6]],
    }[args.case]
    routings = [[[0, 4], [7, 1]], sends] if args.fix else [sends]  # each has its own counts
    for sends in routings:
        receive = exchange_counts(sends[rank]) if args.fix else wrong[rank]
        try:
            out = torch.full((sum(receive), H), -1.0)
            rows = rows_of(rank, sum(sends[rank]))
            dist.all_to_all_single(out, rows, receive, sends[rank], group=group)
            report = f"rank {rank}: expected {receive} rows, got {out[:, 0].int().tolist()}"
            assert not args.fix or out.equal(arriving(sends, rank))
        except RuntimeError as error:
            assert not args.fix, error
            message = reason(error)
            message = message[max(0, message.find("inLength")) :].strip()
            report = f"rank {rank}: {type(error).__name__}: {message}"
    # the rows, and the counts before them
    assert exchange.call_count == len(routings) * (1 + args.fix)
    reports: list = [None, None]
    dist.all_gather_object(reports, report)
    if rank == 0:
        print("\n".join(reports), flush=True)
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    group.abort()  # since NCCL 2.31, no rank can destroy a group that another rank has aborted
    return 0 if args.fix else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
