"""Step 5: no all-gather"""

import torch
import torch.distributed as dist

STEP, HINT = 5, "no_gather"


def hierarchical_all_reduce(tensor, inner, outer):
    pieces = list(tensor.chunk(dist.get_world_size(inner)))
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=inner)
    dist.all_reduce(mine, group=outer)
    pieces[dist.get_rank(inner)].copy_(mine)
