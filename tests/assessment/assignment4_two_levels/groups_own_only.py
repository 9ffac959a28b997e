"""Step 1: each rank makes its own groups"""

STEP, HINT = 1, "not_all"


def make_groups(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    rank, world = dist.get_rank(), dist.get_world_size()
    first = rank // local * local
    node = dist.new_group(list(range(first, first + local)))
    rail = dist.new_group(list(range(rank % local, world, local)))
    return node, rail
