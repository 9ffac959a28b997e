"""Step 4: the frozen parameter's gradient is None"""

import torch.distributed as dist

STEP, HINT = 4, "none_gradient"


def average_gradients(module):
    for parameter in module.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)
