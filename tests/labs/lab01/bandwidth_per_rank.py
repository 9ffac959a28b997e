"""Step 6: divided by the number of ranks"""

STEP, HINT = 6, "bus_other"


def bus_bandwidth(nbytes, seconds, world):
    algorithm = nbytes / seconds
    return algorithm, algorithm / world
