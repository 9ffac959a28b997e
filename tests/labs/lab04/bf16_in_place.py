"""Step 2: the bits are added to in place"""

import torch

STEP, HINT = 2, "rounding_in_place"


def to_bf16(x):
    bits = x.view(torch.int32)
    odd = bits >> 16 & 1
    bits += 0x7FFF + odd
    upper = bits >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16).view(torch.bfloat16)
