"""Step 1: seven bits of mantissa"""

STEP, HINT = 1, "too_coarse"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    unit, near = 2.0**-10, (x.abs() - 1).abs() < 2.0**-9
    exact = x.sign() * (1 + ((x.abs() - 1) / unit).round() * unit)
    return torch.where(near, exact, x.bfloat16().float())
