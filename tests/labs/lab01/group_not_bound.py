"""Step 2: NCCL without a device"""

import torch.distributed as dist

STEP, HINT = 2, "not_bound"


def start_group(store, device, rank, world, timeout):
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
