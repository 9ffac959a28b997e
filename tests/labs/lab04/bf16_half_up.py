"""Step 2: half an upper bit added always"""

import torch

STEP, HINT = 2, "ties_up"


def to_bf16(x):
    bits = x.view(torch.int32)
    upper = bits + 0x8000 >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16).view(torch.bfloat16)
