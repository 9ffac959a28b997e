"""Step 2: every rank takes the first share"""

import torch

STEP, HINT = 2, "same_shard"


def shard(length, rank, world, epoch):
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(length, generator=generator).tolist()
    order += order[: -length % world]
    return order[0::world]
