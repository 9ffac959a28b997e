"""Step 4: all gradients in one tensor"""

STEP, HINT = 4, "copies"


def fast_clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    if not gradients:
        return torch.zeros(())
    norm = torch.cat([g.reshape(-1).float() for g in gradients]).norm()
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for dtype in {g.dtype for g in gradients}:
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], scale.to(dtype))
    return norm
