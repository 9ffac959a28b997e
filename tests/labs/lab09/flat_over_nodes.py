"""Step 4: a ring over the nodes"""

STEP, HINT = 4, "flat_nodes"


def flat_crossing(size, nodes, ranks):
    return 2 * (nodes - 1) / nodes * size
