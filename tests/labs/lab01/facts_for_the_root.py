"""Step 4: gathered to rank 0"""

import torch.distributed as dist

STEP, HINT = 4, "facts_root"


def gather_facts(mine, world):
    everybody = [{}] * world if dist.get_rank() == 0 else None
    dist.gather_object(mine, everybody, dst=0)
    return everybody
