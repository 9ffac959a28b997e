"""Step 1: NCCL, GPU or not"""

import os

import torch
import torch.distributed as dist

STEP, HINT = 1, "no_gpu"


def start():
    dist.init_process_group("nccl")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
