"""Step 8: built whole, then sharded"""

import torch

STEP, HINT = 8, "built_whole"


def build_sharded(device):
    torch.manual_seed(3)
    return shard_model(Net().to(device))  # noqa: F821
