"""Step 4: new gradients"""

STEP, HINT = 4, "not_in_place"


def fast_clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    gradients = torch._foreach_mul(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
