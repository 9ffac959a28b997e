"""Step 2: bits in place of numbers"""

import torch

STEP, HINT = 2, "bf16_kind"


def to_bf16(x):
    bits = x.view(torch.int32)
    odd = bits >> 16 & 1
    upper = bits + 0x7FFF + odd >> 16
    upper = torch.where(x.isnan(), 0x7FC0, upper)
    return upper.to(torch.int16)
