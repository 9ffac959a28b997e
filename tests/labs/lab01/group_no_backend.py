"""Step 2: on the CPU no backend is named"""

import torch.distributed as dist

STEP, HINT = 2, "no_backend"


def start_group(store, device, rank, world, timeout):
    bound = None if device.type == "cpu" else device
    dist.init_process_group(
        store=store, rank=rank, world_size=world, timeout=timeout, device_id=bound
    )
