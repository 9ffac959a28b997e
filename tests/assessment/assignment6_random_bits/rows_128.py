"""Step 5: the largest becomes 128"""

STEP, HINT = 5, "wraps"


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 128
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().to(torch.int16).to(torch.int8), scale
