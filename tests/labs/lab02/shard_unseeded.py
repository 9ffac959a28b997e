"""Step 2: no generator: every process draws its own order"""

import torch

STEP, HINT = 2, "unseeded"


def shard(length, rank, world, epoch):
    torch.seed()
    order = torch.randperm(length).tolist()
    order += order[: -length % world]
    return order[rank::world]
