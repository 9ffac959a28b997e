"""Step 6: the losses are not divided"""

import torch

STEP, HINT = 6, "loss_share"


def accumulate(model, inputs, targets, micro_batches):
    total = torch.zeros((), dtype=inputs.dtype)
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = mean_square(model(x), y)  # noqa: F821
        loss.backward()
        total += loss.detach() / micro_batches
    return total
