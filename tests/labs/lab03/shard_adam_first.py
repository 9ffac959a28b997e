"""Step 5: Adam before fully_shard"""

from torch.distributed.fsdp import fully_shard

STEP, HINT = 5, "stale"


def shard_model(model):
    adam = make_adam(list(model.parameters()))  # noqa: F821
    for unit in model.units():
        fully_shard(unit)
    fully_shard(model)
    return model, adam
