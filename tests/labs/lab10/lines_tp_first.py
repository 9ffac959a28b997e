"""Step 1: tp is the slowest axis, and its ranks are far apart"""

import torch

STEP, HINT = 1, "tp_neighbours"


def lines(world, pp, tp):
    box = torch.arange(world).view(tp, -1, pp)
    names = ("tp", "dp", "pp")
    return {k: box.movedim(i, -1).flatten(0, 1).tolist() for i, k in enumerate(names)}
