"""Step 5: no decorator"""

import torch

STEP, HINT = 5, "no_custom_bwd"


def make_product(kind):

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.mT

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return (gradient @ weight, gradient.mT @ x)

    return Product
