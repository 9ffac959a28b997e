"""Step 1: the process group is forgotten"""

import torch

STEP, HINT = 1, "not_joined"


def start():
    return torch.device("cpu")
