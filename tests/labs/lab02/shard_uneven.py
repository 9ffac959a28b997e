"""Step 2: no padding"""

import torch

STEP, HINT = 2, "uneven"


def shard(length, rank, world, epoch):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[rank::world]
