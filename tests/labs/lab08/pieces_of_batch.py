# ruff: noqa: F821 (names of the lab)
"""Step 5: rows pieces instead of pieces of rows"""

STEP, HINT = 5, "rows_at_once"


def accumulate(
    model: Net, inputs: torch.Tensor, targets: torch.Tensor, keep: torch.Tensor, rows: int
) -> float:
    """Leave in .grad the gradients of the mean loss over the rows where `keep` is True.

    Runs at most `rows` rows at a time; returns that loss.
    """
    total, counted = 0.0, keep.sum()
    for x, y, k in zip(inputs.chunk(2), targets.chunk(2), keep.chunk(2), strict=True):
        loss = (square_of_rows(model(x), y) * k).sum() / counted
        loss.backward()
        total += loss.item()
    return total
