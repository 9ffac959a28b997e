"""Step 4: twice the size"""

STEP, HINT = 4, "flat"


def flat_crossing(size, nodes, ranks):
    return 2 * size
