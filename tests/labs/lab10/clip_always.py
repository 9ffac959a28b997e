"""Step 8: short gradients are made longer"""

import torch
import torch.distributed as dist

STEP, HINT = 8, "clip_grows"


def clip_gradients(stage, grid, limit):
    square = torch.zeros((), dtype=torch.float64)
    for parameter in stage.parameters():
        if getattr(parameter, "is_cut", False) or grid.shard == 0:
            square += parameter.grad.square().sum()
    dist.all_reduce(square, group=grid.tp_group)
    dist.all_reduce(square, group=grid.pp_group)
    norm = square.sqrt().item()
    scale = limit / (norm + 1e-6)
    for parameter in stage.parameters():
        parameter.grad *= scale
    return norm
