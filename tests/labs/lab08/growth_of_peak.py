# ruff: noqa: F821 (names of the lab)
"""Step 2: the growth of the peak"""

STEP, HINT = 2, "peak_read"


def growth(memory: Memory, step: Callable[[], object], times: int = 3) -> float:
    """Bytes that each call of `step` leaves behind, apart from what the first one makes."""
    step()
    before = memory.peak
    for _ in range(times):
        step()
    return (memory.peak - before) / times
