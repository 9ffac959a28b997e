"""Step 5: from each kernel to the next"""

STEP, HINT = 5, "streams"


def idle(kernels: list[tuple[float, float, float]]) -> tuple[float, float]:
    kernels = sorted(kernels, key=lambda kernel: kernel[1])
    gaps = late = 0.0
    for i in range(1, len(kernels)):
        end, (launched, start, _) = kernels[i - 1][2], kernels[i]
        gap = max(start - end, 0)
        gaps, late = gaps + gap, late + gap * (launched > end)
    return gaps, late
