"""Step 4: it is printed, not returned"""

STEP, HINT = 4, "bytes_kind"


def hierarchical_crossing(size, nodes, ranks):
    print(2 * (nodes - 1) / nodes * size)
