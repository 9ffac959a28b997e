"""Step 1: the device is returned and not made current"""

import torch

STEP, HINT = 1, "not_current"


def pick_device(local_rank, local_world):
    if torch.accelerator.is_available() and torch.accelerator.device_count() >= local_world:
        return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    return torch.device("cpu")
