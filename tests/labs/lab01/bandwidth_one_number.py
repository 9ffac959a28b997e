"""Step 6: the bus bandwidth alone"""

STEP, HINT = 6, "pair"


def bus_bandwidth(nbytes, seconds, world):
    return nbytes / seconds * 2 * (world - 1) / world
