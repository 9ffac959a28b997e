"""Step 4: rings over all ranks"""

STEP, HINT = 4, "outer_all_ranks"


def hierarchical_crossing(size, nodes, ranks):
    return 2 * (nodes * ranks - 1) / (nodes * ranks) * size
