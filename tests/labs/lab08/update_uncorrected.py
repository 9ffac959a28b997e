# ruff: noqa: F821 (names of the lab)
"""Step 4: no correction"""

STEP, HINT = 4, "bias_correction"


def update(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, t: int) -> None:
    """Adam's step t = 1, 2, …, in place on p, m and v, with one temporary of p's size."""
    m.lerp_(g, 1 - BETA1)
    v.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
    denominator = v.sqrt().add_(EPSILON)
    p.addcdiv_(m, denominator, value=-ETA)
