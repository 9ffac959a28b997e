"""Step 5: half of the range"""

STEP, HINT = 5, "unused"


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 64
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
