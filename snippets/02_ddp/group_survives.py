"""After destroy_process_group the group can live on, and abort or hang the process at its end.

`Tensor.backward` puts the current `contextvars` context into thread-local state (since 2.12).
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

import importlib
import multiprocessing
import weakref

import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # DDP imports both: once, not in four processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

kept = []


def train() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    assert ddp.module.bias.grad.eq(4).all()  # of four rows
    return ddp


def try_out(import_first: bool, free_model: bool) -> None:
    if import_first:
        importlib.import_module("torch.distributed.nn")  # elsewhere: an import at the top

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)

    ddp = train()
    if free_model:
        del ddp
    else:
        kept.append(ddp)  # freed here, it could hang as told above

    dist.destroy_process_group()
    print(f"imported first: {import_first}, model freed: {free_model}.", end=" ")
    print(f"Alive after destroy_process_group: {group() is not None}", flush=True)


def main() -> None:
    for import_first in (False, True):
        for free_model in (False, True):
            # in a process for each, which multiprocessing ends by os._exit: so none aborts
            context = multiprocessing.get_context("fork")
            process = context.Process(target=try_out, args=(import_first, free_model))
            process.start()
            process.join()
            assert process.exitcode == 0


if __name__ == "__main__":
    main()
