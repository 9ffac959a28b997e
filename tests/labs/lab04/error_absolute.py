"""Step 7: an absolute error"""

import torch.distributed as dist

STEP, HINT = 7, "error_ratio"


def reduction_error(mean, own):
    true = own.double() / dist.get_world_size()
    dist.all_reduce(true)
    return ((mean.double() - true).norm()).item()
