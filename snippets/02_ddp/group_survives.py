"""After destroy_process_group the group can live on, and abort the process as it leaves.

`DistributedDataParallel` imports `torch.distributed.nn` when it is first constructed, and the
functions in there take the group of that moment as a default argument. So something still
holds the group when `destroy_process_group` lets go of it, and gloo's threads stay. If one of
them is still letting go of the last collective's tensors while the interpreter shuts down, the
process ends with SIGABRT and `terminate called without an active exception`, after all its work
is done: perhaps once in fifty runs, more often on a busy machine.

Import the module before the group exists, and the default argument is None.
"""

import argparse
import gc
import importlib
import os
import sys
import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mend", action="store_true")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 group_survives.py")
    if args.mend:
        importlib.import_module("torch.distributed.nn")  # elsewhere: an import at the top

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = weakref.ref(dist.group.WORLD)

    model = DistributedDataParallel(nn.Linear(8, 8))
    model(torch.rand(4, 8)).sum().backward()
    del model
    gc.collect()

    dist.destroy_process_group()
    if rank == 0:
        print(f"the group is alive after destroy_process_group: {group() is not None}")


if __name__ == "__main__":
    main()
