"""Step 5: no step across"""

import torch.distributed as dist

STEP, HINT = 5, "inside_only"


def hierarchical_all_reduce(tensor, inner, outer):
    dist.all_reduce(tensor, group=inner)
