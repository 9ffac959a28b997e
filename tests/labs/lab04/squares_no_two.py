"""Step 5: the factor 2 forgotten"""

import torch
from torch.amp import custom_bwd, custom_fwd

STEP, HINT = 5, "squares_gradient"


def make_squares(kind):

    class Squares(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=kind, cast_inputs=torch.float32)
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square().sum()

        @staticmethod
        @custom_bwd(device_type=kind)
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return gradient * x

    return Squares
