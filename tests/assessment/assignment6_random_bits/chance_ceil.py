"""Step 4: up instead of down"""

STEP, HINT = 4, "moves_integers"


def round_by_chance(x: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    return (x + uniform(seed, offset, 0, x.numel()).view_as(x)).ceil()
