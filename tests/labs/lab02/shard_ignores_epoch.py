"""Step 2: every epoch has the same order"""

import torch

STEP, HINT = 2, "epoch_ignored"


def shard(length, rank, world, epoch):
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(length, generator=generator).tolist()
    order += order[: -length % world]
    return order[rank::world]
