"""A ring in which every rank sends before it receives can wait forever. Two fixes end this.

dist.send may wait until the other side receives. In a ring each rank sends to its right
neighbour and receives from its left neighbour. If all ranks send first, no rank ever reaches
its recv. In the output, look at the call in which each rank waits. The control shows that one
rank with the opposite order is enough to complete the same ring.

    (no flag)       all ranks send first, and the time limit ends the program
    --control       rank 0 receives first, and the other ranks send first: the ring completes
    --fix order     even ranks send first, odd ranks receive first (an even number of ranks)
    --fix batch     batch_isend_irecv starts both transfers and waits for both
"""

import argparse
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

waits_in = "nothing"  # the blocking call that this rank has entered


def send_then_receive(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    global waits_in
    incoming = torch.empty_like(x)
    waits_in = "send"
    dist.send(x, right, group=group)
    waits_in = "recv"
    dist.recv(incoming, left, group=group)
    return incoming


def receive_then_send(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    dist.recv(incoming, left, group=group)
    dist.send(x, right, group=group)
    return incoming


def one_receives_first(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    shift = receive_then_send if dist.get_rank() == 0 else send_then_receive
    return shift(x, right, left, group)


def odd_and_even(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    shift = receive_then_send if dist.get_rank() % 2 else send_then_receive
    return shift(x, right, left, group)


def both_at_once(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    ops = [
        dist.P2POp(dist.isend, x, right, group),
        dist.P2POp(dist.irecv, incoming, left, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return incoming


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--fix", choices=["order", "batch"])
    args = parser.parse_args()
    n = int(os.environ.get("WORLD_SIZE", "0"))
    if n < 2 or n % 2:
        sys.exit("start this program with: torchrun --nproc-per-node=4 send_deadlock.py")

    # gloo, also on a machine with GPUs: its time limit raises an exception, and the time limit
    # of NCCL ends the process. The default group synchronizes the exit. The calls that may fail
    # use a second group. The limit of rank 0 is the shortest, so its error is a time-out.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    in_vain = not (args.control or args.fix)
    limit = timedelta(seconds=(3 if rank == 0 else 6) if in_vain else 30)
    group = dist.new_group(timeout=limit)

    fixes = {None: send_then_receive, "order": odd_and_even, "batch": both_at_once}
    shift = one_receives_first if args.control else fixes[args.fix]
    x = torch.arange(1024) + 10_000 * rank
    failed, report = False, "has its left neighbour's tensor"
    try:
        received = shift(x, (rank + 1) % n, (rank - 1) % n, group)
        x.zero_()  # a send that is not complete would now send zeros
        assert received.equal(torch.arange(1024) + 10_000 * ((rank - 1) % n))
    except RuntimeError as error:
        failed, report = True, f"waits in {waits_in}"
        if rank == 0:
            message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
            print(f"rank 0: {type(error).__name__}: {message}", flush=True)
    reports = [""] * n
    dist.all_gather_object(reports, report)
    if rank == 0:
        assert len(set(reports)) == 1, reports
        print(f"{shift.__name__}: every rank {report}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
