"""Step 1: the name of the device in place of the device"""

import torch

STEP, HINT = 1, "not_a_device"


def pick_device(local_rank, local_world):
    if torch.accelerator.device_count() >= local_world:
        torch.accelerator.set_device_index(local_rank)
        return f"cuda:{local_rank}"
    return "cpu"
