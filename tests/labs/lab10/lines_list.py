"""Step 1: a list in place of a dict"""

import torch

STEP, HINT = 1, "lines_kind"


def lines(world, pp, tp):
    box = torch.arange(world).view(pp, -1, tp)
    return [box.movedim(axis, -1).flatten(0, 1).tolist() for axis in range(3)]
