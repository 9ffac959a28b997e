"""Step 1: RANK where LOCAL_RANK belongs"""

import os

import torch
import torch.distributed as dist

STEP, HINT = 1, "device_index"


def start():
    rank, local_world = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        device = torch.device(torch.accelerator.current_accelerator().type, rank)
        dist.init_process_group(device_id=device)
        return device
    dist.init_process_group("gloo")
    return torch.device("cpu")
