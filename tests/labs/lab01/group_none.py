"""Step 2: nothing is started"""

STEP, HINT = 2, "not_joined"


def start_group(store, device, rank, world, timeout):
    pass
