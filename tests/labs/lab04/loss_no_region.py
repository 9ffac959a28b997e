"""Step 5: no autocast"""

import contextlib

import torch

STEP, HINT = 5, "forward_outside"


def loss_under_autocast(model, rows, low):
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type, low)
    with region:
        pass
    output = model(rows)
    return mean_loss(output.float(), rows)  # noqa: F821
