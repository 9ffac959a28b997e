"""Step 4: the sum in place of the mean"""

import torch.distributed as dist

STEP, HINT = 4, "not_divided"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
