"""Step 3: nothing is scaled"""

STEP, HINT = 3, "not_scaled"


class Dropout:
    @staticmethod
    def forward(ctx, x, p: float, seed: int, offset: int, first: int = 0):
        ctx.drawn_by = p, seed, offset, first
        return x * (uniform(seed, offset, first, x.numel()).view_as(x) >= p)
