"""Step 4: backward of the plain loss"""

from torch import nn

STEP, HINT = 4, "loss_not_scaled"


def scaled_step(scaler, optimizer, loss, limit):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    loss.backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, limit)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
