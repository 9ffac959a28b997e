"""Step 8: clipped before the average"""

import torch
import torch.distributed as dist
from torch import nn

STEP, HINT = 8, "clip_local"


def train_step(model, optimizer, scaler, rows, low):
    loss = loss_under_autocast(model, rows, low)  # noqa: F821
    (loss if scaler is None else scaler.scale(loss)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # noqa: F821
    average_gradients(model.parameters(), torch.float32)  # noqa: F821
    if scaler is not None:
        scaler.unscale_(optimizer)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()
