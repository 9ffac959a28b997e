# ruff: noqa: F821 (names of the lab)
"""Step 2: the first call counts"""

STEP, HINT = 2, "warm_up"


def growth(memory: Memory, step: Callable[[], object], times: int = 3) -> float:
    """Bytes that each call of `step` leaves behind, apart from what the first one makes."""
    before = memory.used
    for _ in range(times):
        step()
    return (memory.used - before) / times
