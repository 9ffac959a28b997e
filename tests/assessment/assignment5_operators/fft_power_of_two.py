"""Step 3: the next power of two"""

STEP, HINT = 3, "slow_size"


def fast_size(n: int) -> int:
    return 1 << (n - 1).bit_length()
