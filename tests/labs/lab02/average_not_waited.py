"""Step 4: started and not waited for"""

import torch.distributed as dist

STEP, HINT = 4, "not_waited"


def average_gradients(module):
    for parameter in module.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, async_op=True)
