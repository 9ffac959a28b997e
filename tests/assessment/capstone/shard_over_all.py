"""fully_shard over all ranks."""

STEP, HINT = 4, "whole_mesh"


def shard(module: nn.Module, config: Config, mesh: DeviceMesh) -> nn.Module:
    """Shard a module's parameters over the dp dimension, in place, as one unit."""
    policy = MixedPrecisionPolicy(param_dtype=config.dtype, reduce_dtype=torch.float32)
    return fully_shard(module, mp_policy=policy)
