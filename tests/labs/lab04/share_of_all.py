"""Step 3: zeros counted as gradients"""

STEP, HINT = 3, "share_alive"


def share_lost(gradients, scale):
    alive = gradients != 0
    lost = alive & ((gradients * scale).half() == 0)
    return (lost.sum() / alive.numel()).item()
