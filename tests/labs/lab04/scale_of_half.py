"""Step 3: one power too careful"""

import math

import torch.distributed as dist

STEP, HINT = 3, "scale_small"


def loss_scale(gradients):
    largest = gradients.abs().max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return 2.0 ** (math.frexp(65504 / largest.item())[1] - 2)
