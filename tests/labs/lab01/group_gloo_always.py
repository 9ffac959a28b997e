"""Step 2: gloo on every device"""

import torch.distributed as dist

STEP, HINT = 2, "gloo_on_gpu"


def start_group(store, device, rank, world, timeout):
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
