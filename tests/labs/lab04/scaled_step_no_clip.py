"""Step 4: no clipping"""

STEP, HINT = 4, "clip_missing"


def scaled_step(scaler, optimizer, loss, limit):
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
