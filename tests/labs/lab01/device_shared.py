"""Step 1: a GPU for every rank, though there are fewer"""

import torch

STEP, HINT = 1, "shared_device"


def pick_device(local_rank, local_world):
    if torch.accelerator.is_available():
        index = local_rank % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        return torch.device(torch.accelerator.current_accelerator().type, index)
    return torch.device("cpu")
