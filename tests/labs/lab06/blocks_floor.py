"""Step 1: rounded down"""

STEP, HINT = 1, "blocks_down"


def blocks_for(n: int, threads: int) -> int:
    """How many blocks of so many threads cover n elements."""
    return n // threads
