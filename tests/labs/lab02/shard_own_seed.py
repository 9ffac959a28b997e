"""Step 2: the rank is in the seed"""

import torch

STEP, HINT = 2, "overlap"


def shard(length, rank, world, epoch):
    generator = torch.Generator().manual_seed(epoch + rank)
    order = torch.randperm(length, generator=generator).tolist()
    order += order[: -length % world]
    return order[rank::world]
