"""Step 8: who waits in vain forgets what it has heard"""

import torch.distributed as dist

STEP, HINT = 8, "gave_up"


def exchange_metadata(store, call, mine, rank, world, timeout):
    store.set(f"{call}/{rank}", mine)
    try:
        store.wait([f"{call}/{other}" for other in range(world)], timeout)
    except dist.DistStoreError:
        return [None] * world
    return [store.get(f"{call}/{other}").decode() for other in range(world)]
