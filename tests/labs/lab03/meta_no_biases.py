"""Step 8: only the weights are written"""

import torch
from torch import nn

STEP, HINT = 8, "not_written"


def build_sharded(device):
    with torch.device("meta"):
        model = Net()  # noqa: F821
    model, adam = shard_model(model)  # noqa: F821
    model.to_empty(device=device)
    torch.manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            whole = nn.Linear(module.in_features, module.out_features)
            with torch.no_grad():
                module.weight.to_local().copy_(my_rows(whole.weight, module.weight))  # noqa: F821
                module.bias.to_local().zero_()
    return model, adam
