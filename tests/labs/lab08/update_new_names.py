# ruff: noqa: F821 (names of the lab)
"""Step 4: new tensors with old names"""

STEP, HINT = 4, "in_place"


def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: int) -> None:
    """Adam's step t = 1, 2, …, in place on p, m and v, with one temporary of p's size."""
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g * g
    denominator = v.sqrt().div_(math.sqrt(1 - BETA2**t)).add_(EPSILON)
    p.addcdiv_(m, denominator, value=-ETA / (1 - BETA1**t))
