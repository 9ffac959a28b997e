"""Step 5: the whole tensor in both groups"""

import torch.distributed as dist

STEP, HINT = 5, "whole_crosses"


def hierarchical_all_reduce(tensor, inner, outer):
    dist.all_reduce(tensor, group=inner)
    dist.all_reduce(tensor, group=outer)
