"""Step 4: one outer group"""

STEP, HINT = 4, "outer_one"


def hierarchical_crossing(size, nodes, ranks):
    return 2 * (nodes - 1) / nodes * size / ranks
