"""Step 1: the CPU, whatever the machine has"""

import torch

STEP, HINT = 1, "no_accelerator"


def pick_device(local_rank, local_world):
    return torch.device("cpu")
