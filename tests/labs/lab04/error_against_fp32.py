"""Step 7: against the mean in fp32"""

import torch.distributed as dist

STEP, HINT = 7, "error_fp32"


def reduction_error(mean, own):
    true = own.clone() / dist.get_world_size()
    dist.all_reduce(true)
    return ((mean - true).norm() / true.norm()).item()
