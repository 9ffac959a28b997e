"""Step 8: the loss of this rank"""

import torch
from torch import nn

STEP, HINT = 8, "loss_own"


def train_step(model, optimizer, scaler, rows, low):
    loss = loss_under_autocast(model, rows, low)  # noqa: F821
    (loss if scaler is None else scaler.scale(loss)).backward()
    average_gradients(model.parameters(), torch.float32)  # noqa: F821
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # noqa: F821
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    mean = loss.detach()
    return mean.item()
