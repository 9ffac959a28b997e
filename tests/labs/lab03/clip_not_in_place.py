"""Step 6: the gradients are not scaled in place"""

import torch.distributed as dist

STEP, HINT = 6, "not_scaled"


def clip_gradients(gradients, limit):
    square = sum(gradient.square().sum() for gradient in gradients)
    dist.all_reduce(square)
    norm = square.sqrt().item()
    scale = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient = gradient * scale
    return norm
