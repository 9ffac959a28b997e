"""Step 7: one unit of everything"""

from torch.distributed.fsdp import fully_shard

STEP, HINT = 7, "units"


def shard(model):
    fully_shard(model)
    return model
