"""Step 7: a gradient that is None"""

import torch.distributed as dist

STEP, HINT = 7, "none_gradient"


def average_gradients(parameters, wire):
    for parameter in parameters:
        if parameter.requires_grad:
            sent = (parameter.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(sent)
            parameter.grad.copy_(sent)
