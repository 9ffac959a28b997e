"""Step 5: the units alone"""

from torch.distributed.fsdp import fully_shard

STEP, HINT = 5, "no_root"


def shard_model(model):
    for unit in model.units():
        fully_shard(unit)
    return model, make_adam(list(model.parameters()))  # noqa: F821
