"""new_group is called by its members only: this group works, and the next group fails.

Each process names groups by a counter, and the members of a group find each other under that
name in the store. If only ranks 0 and 1 create their pair, they have counted one group more
than ranks 2 and 3. The pair works. The next group, which all four ranks create, has two names.
Each half waits for the other half under its own name, and the error is raised at a line that
is right.

    (no flag)     only the members create the pair
    --fix all     every rank creates the pair, member or not
    --fix local   use_local_synchronization=True: the name is made of the members, and only the
                  members create the pair. This helps up to torch 2.13. Since torch 2.14 the
                  members still count one group more
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

PAIR = [0, 1]


def make_groups(fix: str | None, limit: timedelta) -> dist.ProcessGroup:
    """Create the pair, use it, and return a group of all ranks."""
    member = dist.get_rank() in PAIR
    if member or fix == "all":
        pair = dist.new_group(PAIR, limit, use_local_synchronization=fix == "local")
    if member:
        total = torch.ones(1)
        dist.all_reduce(total, group=pair)
        if dist.get_rank() == 0:
            print(f"rank 0: the sum over the pair is {total.item():.0f}", flush=True)
    return dist.new_group(timeout=limit)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", choices=["all", "local"])
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "4":
        sys.exit("start this program with: torchrun --nproc-per-node=4 members_only_group.py")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()

    failed = False
    try:
        in_vain = not args.fix or (args.fix == "local" and torch.__version__ >= "2.14")
        group = make_groups(args.fix, timedelta(seconds=4 if in_vain else 60))
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        report = f"the sum over all is {total.item():.0f}"
    except RuntimeError as error:
        failed = True
        report = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if rank == 0:
        print(f"rank 0: {report}", flush=True)

    dist.barrier()  # of the default group, which has the same name on all ranks
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
