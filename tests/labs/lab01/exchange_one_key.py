"""Step 8: one key for all ranks"""

import torch.distributed as dist

STEP, HINT = 8, "one_key"


def exchange_metadata(store, call, mine, rank, world, timeout):
    store.set(call, mine)
    texts = []
    for _ in range(world):
        try:
            store.wait([call], timeout)
            texts.append(store.get(call).decode())
        except dist.DistStoreError:
            texts.append(None)
    return texts
