"""Step 4: only rank 0 calls the collective"""

import torch.distributed as dist

STEP, HINT = 4, "some_ranks"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None and dist.get_rank() == 0:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
