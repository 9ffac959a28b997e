"""Step 2: g sums in backward as well"""

STEP, HINT = 2, "g_backward"


class SumOverShards:
    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return all_reduced(part, group)  # noqa: F821

    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient, ctx.group), None  # noqa: F821
