"""Step 2: NaN rounded like a number"""

import torch

STEP, HINT = 2, "nan_lost"


def to_bf16(x):
    bits = x.view(torch.int32)
    odd = bits >> 16 & 1
    upper = bits + 0x7FFF + odd >> 16
    return upper.to(torch.int16).view(torch.bfloat16)
