"""Step 1: a GPU for every rank, though there are fewer"""

import os

import torch
import torch.distributed as dist

STEP, HINT = 1, "shared_device"


def start():
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.accelerator.is_available():
        device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
        dist.init_process_group(device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")
