"""Step 2: one rank of each node sends everything"""

STEP, HINT = 2, "between"


def all_reduce_two_levels(flat, node, rail):
    ranks = dist.get_process_group_ranks(node)
    dist.reduce(flat, ranks[0], group=node)
    if dist.get_rank() == ranks[0]:
        dist.all_reduce(flat, group=rail)
    dist.broadcast(flat, ranks[0], group=node)
