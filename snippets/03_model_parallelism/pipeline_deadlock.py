"""1F1B with blocking sends deadlocks: both neighbours send, and neither receives.

In the middle of 1F1B, a stage has an activation for the next stage, and the next stage has a
gradient for it at the same moment. A blocking send waits until the other side receives, so both
wait forever.

    (no flag)   send, then receive: the timeout ends it
    --fix      both in one batch_isend_irecv
"""

import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

M, SIZE = 4, 2**20  # micro-batches; floats of an activation


def send_then_receive(outgoing: torch.Tensor, peer: int, group) -> torch.Tensor:
    incoming = torch.zeros_like(outgoing)
    dist.send(outgoing, peer, group=group)
    dist.recv(incoming, peer, group=group)
    return incoming


def exchange_at_once(outgoing: torch.Tensor, peer: int, group) -> torch.Tensor:
    incoming = torch.zeros_like(outgoing)
    ops = [
        dist.P2POp(dist.isend, outgoing, peer, group),
        dist.P2POp(dist.irecv, incoming, peer, group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return incoming


def main() -> int:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 pipeline_deadlock.py")
    # gloo, also with GPUs: its timeout raises an exception, and NCCL's ends the process.
    # A second group runs the operations that may fail; the default group ends in order.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=3 if rank == 0 else 6))
    exchange = exchange_at_once if "--fix" in sys.argv else send_then_receive

    tensor, failed, done = torch.full((SIZE,), rank + 1.0), False, 0
    try:
        if rank == 0:  # warm-up: the forward of micro-batch 0
            dist.send(tensor, 1, group=group)
        else:
            dist.recv(torch.empty_like(tensor), 0, group=group)
        for _ in range(1, M):  # rank 0: F, then B; rank 1: B, then F
            arrived = exchange(tensor, 1 - rank, group)
            assert (arrived == 2 - rank).all()  # the whole tensor of the other rank has arrived
            done += 1
    except RuntimeError as error:
        failed = True
        if rank == 0:
            message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
            print(
                f"rank 0, after {done} exchanges: {type(error).__name__}: {message}", flush=True
            )
    else:
        if rank == 0:
            print(f"{exchange.__name__}: {done} of {M - 1} exchanges done", flush=True)
    dist.barrier()
    return int(failed)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
