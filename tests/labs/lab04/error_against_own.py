"""Step 7: against the gradient of this rank"""

import torch.distributed as dist

STEP, HINT = 7, "error_own"


def reduction_error(mean, own):
    true = own.double() / dist.get_world_size()
    return ((mean.double() - true).norm() / true.norm()).item()
