"""Step 3: every part begins at 0"""

STEP, HINT = 3, "first"


class Dropout:
    @staticmethod
    def forward(ctx, x, p: float, seed: int, offset: int, first: int = 0):
        ctx.drawn_by = p, seed, offset, 0
        kept = uniform(seed, offset, 0, x.numel()).view_as(x) >= p
        return x * kept / (1 - p)
