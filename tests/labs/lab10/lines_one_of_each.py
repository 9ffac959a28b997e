"""Step 1: only the groups of rank 0"""

import torch

STEP, HINT = 1, "lines_partition"


def lines(world, pp, tp):
    box = torch.arange(world).view(pp, -1, tp)
    return {
        "pp": [box[:, 0, 0].tolist()],
        "dp": [box[0, :, 0].tolist()],
        "tp": [box[0, 0].tolist()],
    }
