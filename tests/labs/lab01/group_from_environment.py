"""Step 2: the store of the environment in place of the tested one"""

import torch.distributed as dist

STEP, HINT = 2, "own_store"


def start_group(store, device, rank, world, timeout):
    if device.type == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group(timeout=timeout, device_id=device)
