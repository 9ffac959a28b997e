"""Step 2: the lower half cut off"""

import torch

STEP, HINT = 2, "truncated"


def to_bf16(x):
    bits = x.view(torch.int32)
    upper = bits >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16).view(torch.bfloat16)
