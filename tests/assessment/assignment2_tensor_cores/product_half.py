"""Step 2: only a is split"""

STEP, HINT = 2, "half_split"


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    large = to_tf32(a)
    return mma(to_tf32(a - large), to_tf32(b)) + mma(large, to_tf32(b))
