"""Step 4: only rank 0 calls the collective"""

import torch.distributed as dist

STEP, HINT = 4, "some_ranks"


def gather_facts(mine, world):
    everybody = [{}] * world
    if dist.get_rank() == 0:
        dist.all_gather_object(everybody, mine)
    return everybody
