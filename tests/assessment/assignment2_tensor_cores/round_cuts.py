"""Step 1: the bits are cut off"""

STEP, HINT = 1, "truncated"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
