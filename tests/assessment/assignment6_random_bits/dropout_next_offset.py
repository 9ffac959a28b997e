"""Step 3: the next numbers for backward"""

STEP, HINT = 3, "other_mask"


class Dropout:
    @staticmethod
    def backward(ctx, grad):
        p, seed, offset, first = ctx.drawn_by
        kept = uniform(seed, offset + 1, first, grad.numel()).view_as(grad) >= p
        return grad * kept / (1 - p), None, None, None, None
