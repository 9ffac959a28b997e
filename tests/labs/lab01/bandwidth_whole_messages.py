"""Step 6: every message of the ring is taken for the whole tensor"""

STEP, HINT = 6, "factor_n"


def bus_bandwidth(nbytes, seconds, world):
    algorithm = nbytes / seconds
    return algorithm, algorithm * 2 * (world - 1)
