"""Everybody sends first: a ring of blocking sends waits for ever, and two ways out.

dist.send returns when its buffer may be reused, which can be as late as the moment when the
other side has received. If every rank sends to its right neighbour before it receives from the
left, nobody gets as far as to receive.

    (no flag)      all send, then all receive: the time limit ends it
    --fix order   even ranks send first, odd ranks receive first (an even number of ranks)
    --fix batch   batch_isend_irecv: both at once, then wait for both
"""

import argparse
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist


def all_send_first(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    dist.send(x, right, group=group)
    dist.recv(incoming, left, group=group)
    return incoming


def odd_and_even(x: torch.Tensor, right: int, left: int, group: dist.ProcessGroup):
    incoming = torch.empty_like(x)
    if dist.get_rank() % 2 == 0:
        dist.send(x, right, group=group)
        dist.recv(incoming, left, group=group)
    else:
        dist.recv(incoming, left, group=group)
        dist.send(x, right, group=group)
    return incoming


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
    parser.add_argument("--fix", choices=["order", "batch"])
    args = parser.parse_args()
    n = int(os.environ.get("WORLD_SIZE", "0"))
    if n < 2 or n % 2:
        sys.exit("start this program with: torchrun --nproc-per-node=4 send_deadlock.py")

    # gloo, also where there are GPUs: its time limit is an exception, NCCL's ends the process.
    # The default group serves to end in order; what may fail runs in a second one.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))

    shift = {None: all_send_first, "order": odd_and_even, "batch": both_at_once}[args.fix]
    x = torch.arange(1024) + rank
    failed = False
    try:
        x.copy_(shift(x, (rank + 1) % n, (rank - 1) % n, group))
        assert x.equal(torch.arange(1024) + (rank - 1) % n)
    except RuntimeError as error:
        failed = True
        if rank == 0:
            message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
            print(f"rank 0: {type(error).__name__}: {message}", flush=True)
    else:
        if rank == 0:
            print(f"{shift.__name__}: every rank has its left neighbour's tensor", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
