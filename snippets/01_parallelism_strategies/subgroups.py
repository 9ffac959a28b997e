"""Every rank must call new_group for every group, here the rows and columns of a 2×2 grid.

Ranks 0 1 / 2 3 form a square. Each rank belongs to one row and one column, and has a rank in
each of them. Look at the loops: every rank creates all four groups in the same order, also the
groups to which it does not belong. For such a group it gets a placeholder that it cannot use.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist

SIDE = 2
ROWS = [[0, 1], [2, 3]]
COLUMNS = [[0, 2], [1, 3]]


def make_groups(layout: list[list[int]]) -> dist.ProcessGroup:
    """Create a group for each list of ranks. Return the group to which this rank belongs."""
    mine = None
    for ranks in layout:
        group = dist.new_group(ranks)  # every rank calls it, member or not
        if dist.get_rank() in ranks:
            mine = group
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER and dist.get_rank(group) == -1
    return mine


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def main() -> None:
    if int(os.environ.get("WORLD_SIZE", "0")) != SIDE**2:
        sys.exit("4 ranks make the 2 × 2 grid: torchrun --nproc-per-node=4 subgroups.py")
    device = init_distributed()
    rank = dist.get_rank()
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as calls:
        row, column = make_groups(ROWS), make_groups(COLUMNS)
    assert calls.call_args_list == [mock.call(ranks) for ranks in ROWS + COLUMNS]  # all four

    results = []
    for group in (row, column, None):  # None: the default group, all ranks
        total = torch.tensor([10**rank], device=device)  # each digit is one rank
        dist.all_reduce(total, group=group)
        results.append(f"{total.item():04}")

    lines: list = [None] * dist.get_world_size()
    mine = (
        f"rank {rank}: rank {row.rank()} of row {dist.get_process_group_ranks(row)}, "
        f"rank {column.rank()} of column {dist.get_process_group_ranks(column)}; "
        f"sums {' '.join(results)}"
    )
    dist.all_gather_object(lines, mine)
    if rank == 0:
        print(*lines, sep="\n")

    # src= is a global rank: the first rank of row 1 is rank 2. group_src= counts in the group.
    root = dist.get_global_rank(row, 0)
    first = rank // SIDE * SIDE
    assert root == first
    for src in (root, 0):  # row 1 does not accept rank 0, which is not in it
        value = torch.tensor([rank, -rank], device=device)
        try:
            dist.broadcast(value, src=src, group=row)
            assert value.tolist() == [src, -src]
        except ValueError:
            assert src < first
    value = torch.tensor([rank, -rank], device=device)
    dist.broadcast(value, group_src=1, group=row)
    assert value.tolist() == [first + 1, -first - 1]
    if rank == 0:
        print("broadcast in each row from its first rank: equal to 0 0 2 2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
