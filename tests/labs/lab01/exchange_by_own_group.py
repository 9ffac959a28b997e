"""Step 8: a group of its own in place of the store"""

import torch.distributed as dist

STEP, HINT = 8, "no_collective"


def exchange_metadata(store, call, mine, rank, world, timeout):
    if not dist.is_initialized():
        meeting = dist.PrefixStore("meeting", store)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world)
    texts = [""] * world
    dist.all_gather_object(texts, mine)
    return texts
