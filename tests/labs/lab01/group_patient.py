"""Step 2: the timeout is forgotten"""

import torch.distributed as dist

STEP, HINT = 2, "no_timeout"


def start_group(store, device, rank, world, timeout):
    who = {"store": store, "rank": rank, "world_size": world}
    if device.type == "cpu":
        dist.init_process_group("gloo", **who)
    else:
        dist.init_process_group(device_id=device, **who)
