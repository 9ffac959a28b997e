"""Step 2: the bit below the one that counts"""

import torch

STEP, HINT = 2, "ties_odd"


def to_bf16(x):
    bits = x.view(torch.int32)
    odd = bits >> 15 & 1
    upper = bits + 0x8000 - odd >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16).view(torch.bfloat16)
