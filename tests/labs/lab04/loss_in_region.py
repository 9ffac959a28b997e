"""Step 5: the loss in the region"""

import contextlib

import torch

STEP, HINT = 5, "loss_inside"


def loss_under_autocast(model, rows, low):
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type, low)
    with region:
        output = model(rows)
        return mean_loss(output.float(), rows)  # noqa: F821
