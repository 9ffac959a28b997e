"""Step 2: a device_id on the CPU as well"""

import torch.distributed as dist

STEP, HINT = 2, "bound_on_cpu"


def start_group(store, device, rank, world, timeout):
    dist.init_process_group(
        "gloo" if device.type == "cpu" else None,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=device,
    )
