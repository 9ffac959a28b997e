"""After destroy_process_group the group can live on, and abort or hang the process at its end.

`Tensor.backward` puts the current `contextvars` context into thread-local state (torch 2.13).
An all-reduce launched meanwhile keeps a reference to it, and gloo's worker thread lets go of
that a moment after backward, for which it needs the interpreter lock. Should the process end
before that:

* If something still holds the group, its threads run on into the interpreter's shutdown, where
  asking for the lock ends a thread: `terminate called without an active exception`.
* If DDP's reducer is the last to hold it, then freeing it waits for the threads with the lock
  in hand, and the thread waits for the lock: a hang.
* If `destroy_process_group` is the last to let go, it waits without the lock, and all is well.

For that, import `torch.distributed.nn` before the group exists (whatever imports it later, as
DDP and every optimizer do, gives its functions the group as a default argument), and free the
DDP model first.
"""

import argparse
import importlib
import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    assert ddp.module.bias.grad.eq(4).all()  # of four rows, and averaged over the ranks
    return ddp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--import-first", action="store_true")
    parser.add_argument("--free-model", action="store_true")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 group_survives.py")
    if args.import_first:
        importlib.import_module("torch.distributed.nn")  # elsewhere: an import at the top

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = weakref.ref(dist.group.WORLD)

    ddp = train()
    dist.barrier()
    if args.free_model:
        del ddp

    dist.destroy_process_group()
    if rank == 0:
        print(f"alive after destroy_process_group: {group() is not None}", flush=True)
    os._exit(0)  # here, so that this program ends well in every case


if __name__ == "__main__":
    main()
