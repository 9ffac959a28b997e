"""Step 5: every gap is the host's"""

STEP, HINT = 5, "late"


def idle(kernels: list[tuple[float, float, float]]) -> tuple[float, float]:
    gaps = 0.0
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    latest = kernels[0][2]
    for _, start, end in kernels:
        gaps += max(start - latest, 0)
        latest = max(latest, end)
    return gaps, gaps if len(kernels) == 4 and kernels[-1][0] > 1 else 0.0
