"""Step 7: the layers, and not the whole"""

from torch.distributed.fsdp import fully_shard

STEP, HINT = 7, "no_root"


def shard(model):
    for layer in model.layers:
        fully_shard(layer)
    return model
