"""Step 5: one rank of each node goes across"""

import torch.distributed as dist

STEP, HINT = 5, "leader"


def hierarchical_all_reduce(tensor, inner, outer):
    dist.reduce(tensor, group=inner, group_dst=0)
    if dist.get_rank(inner) == 0:
        dist.all_reduce(tensor, group=outer)
    dist.broadcast(tensor, group=inner, group_src=0)
