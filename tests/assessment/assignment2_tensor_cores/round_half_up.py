"""Step 1: halves away from zero"""

STEP, HINT = 1, "ties"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
