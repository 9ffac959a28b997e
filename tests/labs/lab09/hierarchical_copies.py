"""Step 5: the pieces are copies"""

import torch
import torch.distributed as dist

STEP, HINT = 5, "not_in_place"


def hierarchical_all_reduce(tensor, inner, outer):
    pieces = [piece.clone() for piece in tensor.chunk(dist.get_world_size(inner))]
    mine = torch.empty_like(pieces[0])
    dist.reduce_scatter(mine, pieces, group=inner)
    dist.all_reduce(mine, group=outer)
    dist.all_gather(pieces, mine, group=inner)
