# ruff: noqa: F821 (names of the lab)
"""Step 7: the fewest units"""

STEP, HINT = 7, "too_dear"


def choose(units: Sequence[Unit], budget: int) -> set[int] | None:
    """The units to checkpoint: fewest FLOPs for a peak within `budget`; None: nothing fits."""
    indices, best = range(len(units)), None
    for size in range(len(units) + 1):
        for chosen in itertools.combinations(indices, size):
            if predicted_peak(units, chosen) <= budget:
                flops = sum(units[i].flops for i in chosen)
                if best is None or len(chosen) < len(best[1]):
                    best = flops, set(chosen)
    return best and best[1]
