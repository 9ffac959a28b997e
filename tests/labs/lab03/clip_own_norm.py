"""Step 6: every rank by its own norm"""

STEP, HINT = 6, "norm_local"


def clip_gradients(gradients, limit):
    square = sum(gradient.square().sum() for gradient in gradients)
    norm = square.sqrt().item()
    scale = min(1.0, limit / (norm + 1e-6))
    for gradient in gradients:
        gradient *= scale
    return norm
