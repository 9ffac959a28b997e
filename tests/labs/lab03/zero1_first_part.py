"""Step 2: all ranks take the first part"""

import torch
import torch.distributed as dist
from torch import nn

STEP, HINT = 2, "shard_part"


class ZeRO1:
    def __init__(self, model):
        self.model, self.n = model, dist.get_world_size()
        parameters = list(model.parameters())
        self.flat, windows = lay_out([p.detach() for p in parameters], self.n)  # noqa: F821
        self.gradient, slots = lay_out([torch.zeros_like(p) for p in parameters], self.n)  # noqa: F821
        for parameter, window, slot in zip(parameters, windows, slots, strict=True):
            parameter.data, parameter.grad = window, slot
        self.shard = nn.Parameter(self.flat.chunk(self.n)[0])
        self.adam = make_adam([self.shard])  # noqa: F821
