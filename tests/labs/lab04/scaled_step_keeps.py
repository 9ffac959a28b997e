"""Step 4: gradients are left"""

from torch import nn

STEP, HINT = 4, "not_zeroed"


def scaled_step(scaler, optimizer, loss, limit):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, limit)
    scaler.step(optimizer)
    scaler.update()
