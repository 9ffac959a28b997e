"""Step 2: the end is cut where it does not divide"""

import torch

STEP, HINT = 2, "dropped"


def shard(length, rank, world, epoch):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    return order[: length // world * world][rank::world]
