"""Step 7: divided after the sum"""

import torch.distributed as dist

STEP, HINT = 7, "divided_late"


def average_gradients(parameters, wire):
    for parameter in parameters:
        if parameter.grad is not None:
            sent = parameter.grad.to(wire)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent / dist.get_world_size())
