"""Step 3: the mask in a dictionary"""

STEP, HINT = 3, "stored"


class Dropout:
    @staticmethod
    def forward(ctx, x, p, seed, offset, first=0):
        ctx.p = p
        ctx.info = {"mask": uniform(seed, offset, first, x.numel()).view_as(x) >= p}
        return x * ctx.info["mask"] / (1 - p)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.info["mask"] / (1 - ctx.p), None, None, None, None
