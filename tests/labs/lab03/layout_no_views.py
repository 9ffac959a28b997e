"""Step 2: the tensors themselves are returned"""

import torch

STEP, HINT = 2, "layout_views"


def lay_out(tensors, n):

    flat = torch.cat([tensor.flatten() for tensor in tensors])
    flat = torch.cat([flat, flat.new_zeros(-len(flat) % n)])
    return flat, list(tensors)
