"""Step 8: nothing is set"""

STEP, HINT = 8, "not_told"


def exchange_metadata(store, call, mine, rank, world, timeout):
    return [mine] + [None] * (world - 1)
