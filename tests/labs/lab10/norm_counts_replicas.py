"""Step 8: the replicas count too"""

import torch
import torch.distributed as dist

STEP, HINT = 8, "norm_replicas"


def clip_gradients(stage, grid, limit):
    square = torch.zeros((), dtype=torch.float64)
    for parameter in stage.parameters():
        if getattr(parameter, "is_cut", False) or grid.shard == 0:
            square += parameter.grad.square().sum()
    dist.all_reduce(square)
    norm = square.sqrt().item()
    scale = min(1.0, limit / (norm + 1e-6))
    for parameter in stage.parameters():
        parameter.grad *= scale
    return norm
