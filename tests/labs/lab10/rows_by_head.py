"""Step 4: q, k and v of one head after the other"""

import torch

STEP, HINT = 4, "per_head"


def rows_by_shard(tp):
    rows = torch.arange(3 * HIDDEN)  # noqa: F821
    return rows.view(3, HEADS, -1).transpose(0, 1).flatten()  # noqa: F821
