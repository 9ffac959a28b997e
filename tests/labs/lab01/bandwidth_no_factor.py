"""Step 6: no factor at all"""

STEP, HINT = 6, "no_factor"


def bus_bandwidth(nbytes, seconds, world):
    algorithm = nbytes / seconds
    return algorithm, algorithm
