"""Step 1: an accelerator without an index"""

import torch

STEP, HINT = 1, "no_index"


def pick_device(local_rank, local_world):
    if torch.accelerator.device_count() >= local_world:
        torch.accelerator.set_device_index(local_rank)
        return torch.accelerator.current_accelerator()
    return torch.device("cpu")
