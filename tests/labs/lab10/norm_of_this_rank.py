"""Step 8: torch's function on what the rank holds"""

import torch

STEP, HINT = 8, "norm_local"


def clip_gradients(stage, grid, limit):
    return torch.nn.utils.clip_grad_norm_(stage.parameters(), limit).item()
