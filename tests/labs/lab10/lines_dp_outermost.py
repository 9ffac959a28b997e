"""Step 1: replicas are the slowest axis, stages lie within"""

import torch

STEP, HINT = 1, "axes_swapped"


def lines(world, pp, tp):
    box = torch.arange(world).view(-1, pp, tp)
    names = ("dp", "pp", "tp")
    return {k: box.movedim(i, -1).flatten(0, 1).tolist() for i, k in enumerate(names)}
