"""Step 1: a bit too many"""

STEP, HINT = 1, "bits_left"


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.contiguous().view(torch.int32) + 0x800) & ~0xFFF).view(torch.float32)
