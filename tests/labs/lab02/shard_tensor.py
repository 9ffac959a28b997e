"""Step 2: a tensor in place of a list"""

import torch

STEP, HINT = 2, "not_a_list"


def shard(length, rank, world, epoch):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    return torch.cat([order, order[: -length % world]])[rank::world]
