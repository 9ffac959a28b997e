"""Step 6: gigabytes per second"""

STEP, HINT = 6, "units"


def bus_bandwidth(nbytes, seconds, world):
    algorithm = nbytes / seconds / 1e9
    return algorithm, algorithm * 2 * (world - 1) / world
