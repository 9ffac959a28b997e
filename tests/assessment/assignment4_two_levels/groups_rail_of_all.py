"""Step 1: the rail is the world"""

STEP, HINT = 1, "rail"


def make_groups(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group(list(range(i, i + local))) for i in range(0, world, local)]
    return nodes[rank // local], dist.new_group(list(range(world)))
