"""Step 8: an all-gather in place of the store"""

import torch.distributed as dist

STEP, HINT = 8, "no_collective"


def exchange_metadata(store, call, mine, rank, world, timeout):
    texts = [""] * world
    dist.all_gather_object(texts, mine)
    return texts
