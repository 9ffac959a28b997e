"""Step 3: a percentage"""

STEP, HINT = 3, "share_percent"


def share_lost(gradients, scale):
    alive = gradients != 0
    lost = alive & ((gradients * scale).half() == 0)
    return 100 * (lost.sum() / alive.sum()).item()
