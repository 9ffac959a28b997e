"""Step 4: a launch for each gradient"""

STEP, HINT = 4, "launches"


def fast_clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    return slow_clip(gradients, limit)
