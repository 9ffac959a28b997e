"""Step 3: the groups of rank 0 for everybody"""

import torch.distributed as dist

STEP, HINT = 3, "groups_kept"


def make_groups(nodes, ranks):
    inner = [dist.new_group([n * ranks + r for r in range(ranks)]) for n in range(nodes)]
    outer = [dist.new_group([n * ranks + r for n in range(nodes)]) for r in range(ranks)]
    return inner[0], outer[0]
