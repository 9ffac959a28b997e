"""Step 4: the optimizer steps by itself"""

from torch import nn

STEP, HINT = 4, "own_step"


def scaled_step(scaler, optimizer, loss, limit):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, limit)
    optimizer.step()
    scaler.update()
    optimizer.zero_grad()
