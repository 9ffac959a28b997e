"""Step 4: the norms in the gradients' own dtype"""

STEP, HINT = 4, "not_same"


def fast_clip(gradients: list[torch.Tensor], limit: float) -> torch.Tensor:
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (limit / (norm + 1e-6)).clamp(max=1.0))
    return norm
