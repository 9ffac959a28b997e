"""Step 7: always sent in fp32"""

import torch.distributed as dist

STEP, HINT = 7, "wire_type"


def average_gradients(parameters, wire):
    for parameter in parameters:
        if parameter.grad is not None:
            sent = parameter.grad / dist.get_world_size()
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
