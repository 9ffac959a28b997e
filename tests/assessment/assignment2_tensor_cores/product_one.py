"""Step 2: one product"""

STEP, HINT = 2, "one_product"


def matmul_3xtf32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return mma(to_tf32(a), to_tf32(b))
