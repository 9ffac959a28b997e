# ruff: noqa: F821 (names of the lab)
"""Step 5: weighted means, of nothing"""

STEP, HINT = 5, "padding_alone"


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, rows: int
) -> float:
    """Leave in .grad the gradients of the mean loss over the rows where `keep` is True.

    Runs at most `rows` rows at a time; returns that loss.
    """
    total, counted = 0.0, keep.sum()
    for x, y, k in zip(inputs.split(rows), targets.split(rows), keep.split(rows), strict=True):
        loss = square_of_rows(model(x), y)[k].mean() * k.sum() / counted
        loss.backward()
        total += loss.item()
    return total
