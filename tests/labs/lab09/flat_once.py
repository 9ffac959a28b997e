"""Step 4: once round"""

STEP, HINT = 4, "half_ring"


def flat_crossing(size, nodes, ranks):
    return (nodes * ranks - 1) / (nodes * ranks) * size
