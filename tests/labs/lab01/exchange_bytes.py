"""Step 8: bytes in place of text"""

import torch.distributed as dist

STEP, HINT = 8, "bytes"


def exchange_metadata(store, call, mine, rank, world, timeout):
    store.set(f"{call}/{rank}", mine)
    texts = []
    for other in range(world):
        try:
            store.wait([f"{call}/{other}"], timeout)
            texts.append(store.get(f"{call}/{other}"))
        except dist.DistStoreError:
            texts.append(None)
    return texts
