"""Step 5: one scale"""

STEP, HINT = 5, "one_scale"


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.abs().max() / 127).expand(len(x), 1)
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
