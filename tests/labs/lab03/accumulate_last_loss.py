"""Step 6: the last loss is returned"""

STEP, HINT = 6, "loss_returned"


def accumulate(model, inputs, targets, micro_batches):
    for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = mean_square(model(x), y) / micro_batches  # noqa: F821
        loss.backward()
    return loss.detach()
