"""Step 1: ranks that find a GPU take it, the others the CPU"""

import torch

STEP, HINT = 1, "shared_device"


def pick_device(local_rank, local_world):
    if torch.accelerator.is_available() and local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
        return torch.device(torch.accelerator.current_accelerator().type, local_rank)
    return torch.device("cpu")
