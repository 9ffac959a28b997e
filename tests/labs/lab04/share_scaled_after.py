"""Step 3: the cast before the scale"""

STEP, HINT = 3, "share_late"


def share_lost(gradients, scale):
    alive = gradients != 0
    lost = alive & ((gradients.half() * scale) == 0)
    return (lost.sum() / alive.sum()).item()
