"""Step 1: every rank makes its own group first"""

import torch.distributed as dist

STEP, HINT = 1, "new_group_by_all"


def join(groups):
    groups = sorted(groups, key=lambda ranks: dist.get_rank() not in ranks)
    made = [dist.new_group(ranks) for ranks in groups]
    return made[0]
