"""Step 4: the biases are left out"""

import torch.distributed as dist

STEP, HINT = 4, "subset"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None and parameter.dim() > 1:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
