"""Step 7: the gradient in the type of the wire"""

import torch.distributed as dist

STEP, HINT = 7, "own_type"


def average_gradients(parameters, wire):
    for parameter in parameters:
        if parameter.grad is not None:
            sent = (parameter.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(sent)
            parameter.grad = None
            parameter.grad_dtype = None
            parameter.grad = sent
