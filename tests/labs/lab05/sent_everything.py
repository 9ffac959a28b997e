"""Step 5: everything is sent, a rank's own part too"""

STEP, HINT = 5, "fraction"


def bytes_sent(kind, size, ranks):
    once = (ranks - 1) / ranks * size
    return 2 * size if kind == "all-reduce" else size if once else 0
