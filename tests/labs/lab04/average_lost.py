"""Step 7: the mean in a copy"""

import torch.distributed as dist

STEP, HINT = 7, "not_written"


def average_gradients(parameters, wire):
    for parameter in parameters:
        if parameter.grad is not None:
            sent = (parameter.grad / dist.get_world_size()).to(wire)
            dist.all_reduce(sent)
