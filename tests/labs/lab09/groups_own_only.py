"""Step 3: every rank makes its own two alone"""

import torch.distributed as dist

STEP, HINT = 3, "groups_by_all"


def make_groups(nodes, ranks):
    node, place = divmod(dist.get_rank(), ranks)
    inner = dist.new_group([node * ranks + r for r in range(ranks)])
    return inner, dist.new_group([n * ranks + place for n in range(nodes)])
