"""Step 2: large times large is missing"""

STEP, HINT = 2, "wrong_product"


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a_large, b_large = to_tf32(a), to_tf32(b)
    a_small, b_small = to_tf32(a - a_large), to_tf32(b - b_large)
    return mma(a_small, b_large) + mma(a_large, b_small)
