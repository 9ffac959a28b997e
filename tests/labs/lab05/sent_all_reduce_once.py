"""Step 5: an all-reduce as an all-gather"""

STEP, HINT = 5, "all_reduce_twice"


def bytes_sent(kind, size, ranks):
    once = (ranks - 1) / ranks * size
    return once
