"""Step 5: in the order they were launched"""

STEP, HINT = 5, "unsorted"


def idle(kernels: list[tuple[float, float, float]]) -> tuple[float, float]:
    gaps = late = 0.0
    latest = kernels[0][2]
    for launched, start, end in kernels:
        gap = max(start - latest, 0)
        gaps, late = gaps + gap, late + gap * (launched > latest)
        latest = max(latest, end)
    return gaps, late
