"""Step 6: short gradients are made longer"""

import torch.distributed as dist

STEP, HINT = 6, "grows"


def clip_gradients(gradients, limit):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    scale = limit / (norm + 1e-6)
    for gradient in gradients:
        gradient *= scale
    return norm
