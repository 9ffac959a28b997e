"""Two of four ranks do not arrive: a collective only times out, monitored_barrier names them.

The barrier uses messages between two ranks: each rank sends one to rank 0, and rank 0 answers.
It works only with gloo, so a job on NCCL makes a second group for it:
dist.new_group(backend="gloo").
"""

import os
import re
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

ABSENT = (2, 3)


# --8<-- [start:result]
def result(what: str, group: dist.ProcessGroup) -> str:
    """Call a collective or a barrier, and return the first line of its error message."""
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
    return "all ranks arrived"


# --8<-- [end:result]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    assert result("all_reduce", dist.group.WORLD) == "all ranks arrived"
    messages = {}
    for what in ("all_reduce", "monitored_barrier", "monitored_barrier, wait for all"):
        dist.barrier()
        timeout = timedelta(seconds=4 if rank == 0 else 20)  # rank 0 must give up first
        group = dist.new_group(timeout=timeout)  # a group cannot be used after a failure
        dist.barrier()
        if rank in ABSENT:
            time.sleep(5)
        else:
            messages[what] = result(what, group)
    if rank == 0:
        for what, message in messages.items():
            print(f"{what}:\n  {message}")
        assert "Timed out" in messages["all_reduce"] or "closed" in messages["all_reduce"]
        assert "Rank 2 failed" in messages["monitored_barrier"]
        assert "Ranks 2, 3 failed" in messages["monitored_barrier, wait for all"]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) != 4:
        sys.exit("missing_rank.py needs 4 ranks, started by torchrun")
    torch.set_num_threads(1)
    main()
