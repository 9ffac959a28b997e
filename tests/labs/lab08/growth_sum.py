# ruff: noqa: F821 (names of the lab)
"""Step 2: the sum of all calls"""

STEP, HINT = 2, "not_divided"


def growth(memory: Memory, step: Callable[[], object], times: int = 3) -> float:
    """Bytes that each call of `step` leaves behind, apart from what the first one makes."""
    step()
    before = memory.used
    for _ in range(times):
        step()
    return memory.used - before
