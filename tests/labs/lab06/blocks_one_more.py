"""Step 1: always one more"""

STEP, HINT = 1, "blocks_more"


def blocks_for(n: int, threads: int) -> int:
    """How many blocks of so many threads cover n elements."""
    return n // threads + 1
