"""Step 1: the name of the device in place of the device"""

import torch.distributed as dist

STEP, HINT = 1, "not_a_device"


def start():
    dist.init_process_group("gloo")
    return "cpu"
