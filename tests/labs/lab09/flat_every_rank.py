"""Step 4: every rank crosses"""

STEP, HINT = 4, "flat_every_rank"


def flat_crossing(size, nodes, ranks):
    return ranks * 2 * (nodes * ranks - 1) / (nodes * ranks) * size
