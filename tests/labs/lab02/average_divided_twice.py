"""Step 4: divided before and after"""

import torch.distributed as dist

STEP, HINT = 4, "divided_twice"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
