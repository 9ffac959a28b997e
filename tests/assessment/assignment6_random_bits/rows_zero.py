"""Step 5: a row of zeros"""

STEP, HINT = 5, "zero_row"


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 127
    pass
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
