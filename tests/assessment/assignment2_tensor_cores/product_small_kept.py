"""Step 2: the small parts are not rounded"""

STEP, HINT = 2, "not_tf32"


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a_large, b_large = to_tf32(a), to_tf32(b)
    return mma(a - a_large, b_large) + mma(a_large, b - b_large) + mma(a_large, b_large)
