"""Step 4: the size"""

STEP, HINT = 4, "outer"


def hierarchical_crossing(size, nodes, ranks):
    return size
