"""Step 5: inside, and then over all ranks"""

import torch.distributed as dist

STEP, HINT = 5, "twice"


def hierarchical_all_reduce(tensor, inner, outer):
    dist.all_reduce(tensor, group=inner)
    dist.all_reduce(tensor)
