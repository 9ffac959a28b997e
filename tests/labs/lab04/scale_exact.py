"""Step 3: the ratio as it is"""

import torch.distributed as dist

STEP, HINT = 3, "scale_power"


def loss_scale(gradients):
    largest = gradients.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 65504 / largest.item()
