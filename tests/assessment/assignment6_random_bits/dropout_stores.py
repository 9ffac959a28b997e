"""Step 3: the mask is stored"""

STEP, HINT = 3, "stored"


class Dropout:
    @staticmethod
    def forward(ctx, x, p: float, seed: int, offset: int, first: int = 0):
        kept = uniform(seed, offset, first, x.numel()).view_as(x) >= p
        ctx.save_for_backward(kept)
        ctx.p = p
        return x * kept / (1 - p)

    @staticmethod
    def backward(ctx, grad):
        (kept,) = ctx.saved_tensors
        return grad * kept / (1 - ctx.p), None, None, None, None
