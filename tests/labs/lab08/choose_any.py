# ruff: noqa: F821 (names of the lab)
"""Step 7: by what is kept"""

STEP, HINT = 7, "does_not_fit"


def choose(units: Sequence[Unit], budget: int) -> set[int] | None:
    """The units to checkpoint: fewest FLOPs for a peak within `budget`; None: nothing fits."""
    indices, best = range(len(units)), None
    for size in range(len(units) + 1):
        for chosen in itertools.combinations(indices, size):
            if sum(u.kept if i in chosen else u.held for i, u in enumerate(units)) <= budget:
                flops = sum(units[i].flops for i in chosen)
                if best is None or flops < best[0]:
                    best = flops, set(chosen)
    return best and best[1]
