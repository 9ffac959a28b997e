"""Step 8: a get without a wait"""

STEP, HINT = 8, "endless_wait"


def exchange_metadata(store, call, mine, rank, world, timeout):
    store.set(f"{call}/{rank}", mine)
    return [store.get(f"{call}/{other}").decode() for other in range(world)]
