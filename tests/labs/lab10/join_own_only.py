"""Step 1: every rank makes its own group alone"""

import torch.distributed as dist

STEP, HINT = 1, "new_group_by_all"


def join(groups):
    mine = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(mine)
