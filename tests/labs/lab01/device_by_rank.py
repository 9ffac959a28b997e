"""Step 1: RANK where the local rank belongs"""

import os

import torch

STEP, HINT = 1, "device_index"


def pick_device(local_rank, local_world):
    if torch.accelerator.device_count() >= local_world:
        rank = int(os.environ["RANK"])
        torch.accelerator.set_device_index(rank)
        return torch.device(torch.accelerator.current_accelerator().type, rank)
    return torch.device("cpu")
