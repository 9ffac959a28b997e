"""all_to_all_single with split sizes that disagree: an exception, an abort, or wrong data.

The sender and the receiver both give the size of each part, and no check compares the two. In
expert parallelism the sizes come from the router, so one old count is enough for a mistake. If
the two numbers of one rank differ, that rank raises an error. If a message is longer than
expected, the process is aborted. If it is shorter, no error is raised, and the end of the
buffer keeps its old contents, -1 in this program.

    --case own      what a rank sends to itself is not what it expects from itself
    --case long     it expects fewer rows from the other rank than come
    --case short    it expects more
    --fix          the counts are exchanged first
"""

import argparse
import os
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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=["own", "long", "short"], default="own")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "0")) != 2:
        sys.exit("the case is for 2 ranks: torchrun --nproc-per-node=2 split_sizes.py")
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))  # the messages are gloo's
    rank = dist.get_rank()
    exchange = dist.all_to_all_single = mock.Mock(wraps=dist.all_to_all_single)  # counts calls

    send = [[3, 5], [2, 6]][rank]  # what the router decided, so [3, 2] and [5, 6] will come
    receive = {
        "own": [[4, 4], [4, 4]],  # what an even router would send
        "long": [[3, 1], [5, 6]],  # rank 0 expects too little
        "short": [[3, 4], [7, 6]],
    }[args.case][rank]
    if args.fix:
        receive = exchange_counts(send)
    rows = torch.full((sum(send), H), float(rank))
    try:
        out = torch.full((sum(receive), H), -1.0)
        dist.all_to_all_single(out, rows, receive, send)
        report = f"rank {rank}: expected {receive} rows, got {out[:, 0].int().tolist()}"
    except RuntimeError as error:
        message = str(error).splitlines()[0]
        message = message[message.find("inLength") :].strip()
        report = f"rank {rank}: {type(error).__name__}: {message}"
    assert exchange.call_count == 1 + args.fix  # the rows, and the counts before them
    reports: list = [None, None]
    dist.all_gather_object(reports, report)
    if rank == 0:
        print("\n".join(reports), flush=True)
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    return 0 if args.fix else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
