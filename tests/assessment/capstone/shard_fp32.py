"""No precision."""

STEP, HINT = 4, "param_dtype"


def shard(module, config, mesh):
    return fully_shard(module, mesh=mesh["dp"])
