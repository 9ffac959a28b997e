"""Step 3: negative gradients overlooked"""

import math

import torch.distributed as dist

STEP, HINT = 3, "scale_sign"


def loss_scale(gradients):
    largest = gradients.max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** (math.frexp(65504 / largest.item())[1] - 1)
