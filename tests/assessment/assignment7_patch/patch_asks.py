"""Step 4: the host decides whether to clip"""

STEP, HINT = 4, "host"


def fast_clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    if not gradients:
        return torch.zeros(())
    norm = torch.stack([g.float().norm() for g in gradients]).norm()
    if norm > limit:
        for g in gradients:
            g.mul_((limit / (norm + 1e-6)).to(g.dtype))
    return norm
