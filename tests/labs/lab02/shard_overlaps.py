"""Step 2: the stride is too short"""

import torch

STEP, HINT = 2, "overlap"


def shard(length, rank, world, epoch):
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    share = -(-length // world)
    return order[rank : rank + share]
