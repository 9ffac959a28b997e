"""Step 4: to the nearest"""

STEP, HINT = 4, "biased"


def round_by_chance(x: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    return x.round()
