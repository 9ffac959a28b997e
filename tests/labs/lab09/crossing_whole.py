"""Step 4: the whole tensor in every outer group"""

STEP, HINT = 4, "outer_whole"


def hierarchical_crossing(size, nodes, ranks):
    return ranks * 2 * (nodes - 1) / nodes * size
