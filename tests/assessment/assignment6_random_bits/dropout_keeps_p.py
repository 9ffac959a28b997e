"""Step 3: kept with probability p"""

STEP, HINT = 3, "share"


class Dropout:
    @staticmethod
    def forward(ctx, x, p: float, seed: int, offset: int, first: int = 0):
        ctx.drawn_by = p, seed, offset, first
        return x * (uniform(seed, offset, first, x.numel()).view_as(x) < p) / (1 - p)
