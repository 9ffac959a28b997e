"""Step 8: the call is no part of the key"""

import torch.distributed as dist

STEP, HINT = 8, "stale"


def exchange_metadata(store, call, mine, rank, world, timeout):
    store.set(f"{rank}", mine)
    texts = []
    for other in range(world):
        try:
            store.wait([f"{other}"], timeout)
            texts.append(store.get(f"{other}").decode())
        except dist.DistStoreError:
            texts.append(None)
    return texts
