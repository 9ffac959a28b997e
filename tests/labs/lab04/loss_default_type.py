"""Step 5: the type of autocast by default"""

import contextlib

import torch

STEP, HINT = 5, "low_ignored"


def loss_under_autocast(model, rows, low):
    region = contextlib.nullcontext() if low is None else torch.autocast(rows.device.type)
    with region:
        output = model(rows)
    return mean_loss(output.float(), rows)  # noqa: F821
