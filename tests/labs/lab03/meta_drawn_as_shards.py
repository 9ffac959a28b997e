"""Step 8: every rank draws its own rows"""

import torch
from torch import nn

STEP, HINT = 8, "drawn_as_shards"


def build_sharded(device):
    with torch.device("meta"):
        model = Net()  # noqa: F821
    model, adam = shard_model(model)  # noqa: F821
    model.to_empty(device=device)
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            for parameter in module.parameters():
                nn.init.uniform_(parameter.to_local(), -bound, bound)
    return model, adam
