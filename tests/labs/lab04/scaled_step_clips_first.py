"""Step 4: scaled gradients clipped"""

from torch import nn

STEP, HINT = 4, "clip_before"


def scaled_step(scaler, optimizer, loss, limit):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(parameters, limit)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
