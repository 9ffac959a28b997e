# ruff: noqa: F821 (names of the lab)
"""Step 7: the largest first"""

STEP, HINT = 7, "too_dear"


def choose(units: Sequence[Unit], budget: int) -> set[int] | None:
    """The units to checkpoint: fewest FLOPs for a peak within `budget`; None: nothing fits."""
    order = sorted(range(len(units)), key=lambda i: units[i].kept - units[i].held)
    for size in range(len(units) + 1):
        if predicted_peak(units, order[:size]) <= budget:
            return set(order[:size])
    return None
