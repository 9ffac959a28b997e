"""Step 5: the flat one"""

import torch.distributed as dist

STEP, HINT = 5, "still_flat"


def hierarchical_all_reduce(tensor, inner, outer):
    dist.all_reduce(tensor)
