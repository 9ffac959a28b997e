"""Step 3: ranks dealt out to the nodes in turn"""

import torch.distributed as dist

STEP, HINT = 3, "groups_neighbours"


def make_groups(nodes, ranks):
    rank = dist.get_rank()
    inner = [dist.new_group(list(range(n, nodes * ranks, nodes))) for n in range(nodes)]
    outer = [dist.new_group(list(range(r * nodes, (r + 1) * nodes))) for r in range(ranks)]
    return inner[rank % nodes], outer[rank // nodes]
