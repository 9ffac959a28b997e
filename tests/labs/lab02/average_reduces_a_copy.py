"""Step 4: a copy is reduced"""

import torch.distributed as dist

STEP, HINT = 4, "copy_reduced"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            copy = parameter.grad.clone()
            dist.all_reduce(copy)
            copy /= dist.get_world_size()
