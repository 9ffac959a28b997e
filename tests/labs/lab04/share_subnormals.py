"""Step 3: subnormal numbers counted as lost"""

STEP, HINT = 3, "share_subnormal"


def share_lost(gradients, scale):
    alive = gradients != 0
    lost = alive & ((gradients * scale).half().abs() < 2.0**-14)
    return (lost.sum() / alive.sum()).item()
