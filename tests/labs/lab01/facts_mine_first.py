"""Step 4: sorted so that the own facts come first"""

import torch.distributed as dist

STEP, HINT = 4, "facts_order"


def gather_facts(mine, world):
    everybody = [{}] * world
    dist.all_gather_object(everybody, mine)
    rank = dist.get_rank()
    return everybody[rank:] + everybody[:rank]
