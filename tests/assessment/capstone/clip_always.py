"""Scaled always."""

STEP, HINT = 5, "clip_grows"


def clip(config: Config, model: GPT) -> torch.Tensor:
    """Scale all gradients so that their norm is `config.clip` at most; return the norm."""
    parameters = list(model.parameters())
    shards = [p.grad.to_local() for p in parameters]
    square = torch.zeros((), device=shards[0].device)
    for p, own in zip(parameters, torch._foreach_norm(shards), strict=True):
        sizes = zip(p.placements, p.device_mesh.shape, strict=True)
        square += own**2 / math.prod(n for where, n in sizes if where.is_replicate())
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(shards, (config.clip / (norm + 1e-6)))
    return norm
