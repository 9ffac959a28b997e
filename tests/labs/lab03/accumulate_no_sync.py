"""Step 6: only the last micro-batch is reduced"""

import torch

STEP, HINT = 6, "no_sync"


def accumulate(model, inputs, targets, micro_batches):
    total = torch.zeros((), dtype=inputs.dtype)
    pairs = list(zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True))
    for k, (x, y) in enumerate(pairs):
        model.set_requires_gradient_sync(k == len(pairs) - 1)
        loss = mean_square(model(x), y) / micro_batches  # noqa: F821
        loss.backward()
        total += loss.detach()
    return total
