"""Step 1: rails for nodes"""

STEP, HINT = 1, "node"


def make_groups(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    rank, world = dist.get_rank(), dist.get_world_size()
    nodes = [dist.new_group(list(range(i, i + local))) for i in range(0, world, local)]
    rails = [dist.new_group(list(range(i, world, local))) for i in range(local)]
    return rails[rank % local], nodes[rank // local]
