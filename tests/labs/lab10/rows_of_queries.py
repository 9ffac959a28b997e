"""Step 4: the queries only"""

import torch

STEP, HINT = 4, "not_an_order"


def rows_by_shard(tp):
    return torch.arange(HIDDEN)  # noqa: F821
