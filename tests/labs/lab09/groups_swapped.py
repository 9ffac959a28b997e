"""Step 3: the outer group first"""

import torch.distributed as dist

STEP, HINT = 3, "groups_swapped"


def make_groups(nodes, ranks):
    rank = dist.get_rank()
    inner = [dist.new_group([n * ranks + r for r in range(ranks)]) for n in range(nodes)]
    outer = [dist.new_group([n * ranks + r for n in range(nodes)]) for r in range(ranks)]
    return outer[rank % ranks], inner[rank // ranks]
