"""Step 2: small times small, too"""

STEP, HINT = 2, "four_products"


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a_large, b_large = to_tf32(a), to_tf32(b)
    a_small, b_small = to_tf32(a - a_large), to_tf32(b - b_large)
    return sum(mma(x, y) for x in (a_small, a_large) for y in (b_small, b_large))
