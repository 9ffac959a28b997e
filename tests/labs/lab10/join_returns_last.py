"""Step 1: the group made last, whoever is in it"""

import torch.distributed as dist

STEP, HINT = 1, "wrong_group"


def join(groups):
    for ranks in groups:
        group = dist.new_group(ranks)
    return group
