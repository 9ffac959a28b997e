"""Two ranks of four do not come: a collective says time is over, monitored_barrier says who.

The barrier is point to point: rank 0 hears from each rank, and answers each. It runs on gloo,
so a job on NCCL makes a second group for it: dist.new_group(backend="gloo").
"""

import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ABSENT = (2, 3)


# --8<-- [start:ask]
def ask(what: str, group: dist.ProcessGroup) -> str:
    """Meet the others in one of three ways; what rank 0 is told."""
    short = timedelta(seconds=4)
    try:
        if what == "all_reduce":
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            assert total.item() == dist.get_world_size(group)
        else:
            dist.monitored_barrier(group, timeout=short, wait_all_ranks=what.endswith("all"))
    except RuntimeError as error:
        return re.sub(r"^\[/\S+\] ", "", str(error)).splitlines()[0]
    return "everybody came"


# --8<-- [end:ask]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert ask("all_reduce", dist.group.WORLD) == "everybody came"
    said = {}
    for what in ("all_reduce", "monitored_barrier", "monitored_barrier, wait for all"):
        dist.barrier()
        patience = timedelta(seconds=4 if rank == 0 else 20)  # the others hear it from rank 0
        group = dist.new_group(timeout=patience)  # each failure costs its group
        dist.barrier()
        if rank in ABSENT:
            time.sleep(5)
        else:
            said[what] = ask(what, group)
    if rank == 0:
        for what, message in said.items():
            print(f"{what}:\n  {message}")
        assert "Timed out" in said["all_reduce"] or "closed" in said["all_reduce"]
        assert "Ranks 2, 3 failed" in said["monitored_barrier, wait for all"]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) != 4:
        sys.exit("missing_rank.py needs 4 ranks, started by torchrun")
    torch.set_num_threads(1)
    main()
