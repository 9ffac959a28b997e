"""Step 6: a ring that goes round once"""

STEP, HINT = 6, "half_ring"


def bus_bandwidth(nbytes, seconds, world):
    algorithm = nbytes / seconds
    return algorithm, algorithm * (world - 1) / world
