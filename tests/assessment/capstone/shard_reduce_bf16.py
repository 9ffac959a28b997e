"""Gradients are reduced as they come."""

STEP, HINT = 4, "reduce_dtype"


def shard(module: nn.Module, config: Config, mesh: DeviceMesh) -> nn.Module:
    """Shard a module's parameters over the dp dimension, in place, as one unit."""
    policy = MixedPrecisionPolicy(param_dtype=config.dtype)
    return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
