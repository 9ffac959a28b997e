"""After destroy_process_group a group can still be alive, and abort or hang the process.

`Tensor.backward` puts the current `contextvars` context into thread-local state (since torch
2.12). An all-reduce that is launched meanwhile keeps a reference to it. A worker thread of gloo
frees this reference a moment after backward, and needs the interpreter lock for it. If the
process ends before that, there are three cases:

* Something still holds the group. Its threads then run on while the interpreter shuts down,
  and asking for the lock ends the process: `terminate called without an active exception`.
* DDP's reducer is the last owner of the group. Freeing the group then waits for the threads
  while it holds the lock, and the thread waits for the lock. The process hangs.
* `destroy_process_group` is the last owner. It waits without the lock, and all is well.

To get the third case, import `torch.distributed.nn` before the group exists, and free the DDP
model first. (If DDP or an optimizer imports that module later, the module's functions get the
group as a default argument.) The program shows in which cases the group is still alive.
"""

import importlib
import multiprocessing
import sys
import weakref

import torch
import torch.distributed as dist
import torch.distributed.tensor
import torch.fx.experimental.symbolic_shapes  # DDP imports both: once, not in four processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

alive_at_exit = []


def train() -> DistributedDataParallel:
    ddp = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ddp(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    assert ddp.module.bias.grad.eq(4).all()  # the sum over four rows
    return ddp


def try_out(import_first: bool, free_model: bool) -> None:
    if import_first:
        importlib.import_module("torch.distributed.nn")  # other programs: at the top
    assert ("torch.distributed.nn" in sys.modules) == import_first

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = weakref.ref(dist.group.WORLD)

    ddp = train()
    if free_model:
        del ddp
    else:
        alive_at_exit.append(ddp)

    dist.destroy_process_group()
    print(f"imported first: {import_first}, model freed: {free_model}.", end=" ")
    alive = group() is not None
    print(f"Alive after destroy_process_group: {alive}", flush=True)
    assert alive != (import_first and free_model)


def main() -> None:
    for import_first in (False, True):
        for free_model in (False, True):
            # Each case runs in a process of its own. multiprocessing ends it by os._exit, which
            # skips the shutdown of the interpreter, so that no case can abort or hang.
            context = multiprocessing.get_context("fork")
            process = context.Process(target=try_out, args=(import_first, free_model))
            process.start()
            process.join()
            assert process.exitcode == 0


if __name__ == "__main__":
    main()
