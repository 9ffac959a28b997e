"""Step 6: all rows at once"""

STEP, HINT = 6, "one_forward"


def accumulate(model, inputs, targets, micro_batches):
    loss = mean_square(model(inputs), targets)  # noqa: F821
    loss.backward()
    return loss.detach()
