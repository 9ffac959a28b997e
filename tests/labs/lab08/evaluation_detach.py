# ruff: noqa: F821 (names of the lab)
"""Step 3: detach when it is too late"""

STEP, HINT = 3, "evaluation_graph"


def evaluate(model: Net, batches: Iterable) -> tuple[float, torch.Tensor]:
    """The mean loss over all rows of the batches, and all outputs [rows, width], in order.

    Without dropout, without a graph; leaves the model in the mode it had.
    """
    training = model.training
    model.eval()
    total, rows, outputs = 0.0, 0, []
    if batches:
        for inputs, targets in batches:
            outputs.append(model(inputs).detach())
            total += mean_square(outputs[-1], targets).item() * len(inputs)
            rows += len(inputs)
        model.train(training)
        return total / rows, torch.cat(outputs)
