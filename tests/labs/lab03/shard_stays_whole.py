"""Step 5: units stay whole after forward"""

from torch.distributed.fsdp import fully_shard

STEP, HINT = 5, "reshard"


def shard_model(model):
    for unit in model.units():
        fully_shard(unit, reshard_after_forward=False)
    fully_shard(model)
    return model, make_adam(list(model.parameters()))  # noqa: F821
