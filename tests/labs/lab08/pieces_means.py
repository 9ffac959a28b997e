# ruff: noqa: F821 (names of the lab)
"""Step 5: the mean of means"""

STEP, HINT = 5, "means_added"


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, rows: int
) -> float:
    """Leave in .grad the gradients of the mean loss over the rows where `keep` is True.

    Runs at most `rows` rows at a time; returns that loss.
    """
    total, pieces = 0.0, len(keep.split(rows))
    for x, y, k in zip(inputs.split(rows), targets.split(rows), keep.split(rows), strict=True):
        loss = (square_of_rows(model(x), y) * k).sum() / k.sum() / pieces
        loss.backward()
        total += loss.item()
    return total
