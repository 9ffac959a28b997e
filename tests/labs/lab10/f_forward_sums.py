"""Step 2: f and g are taken for each other"""

STEP, HINT = 2, "f_forward"


class CopyToShards:
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return all_reduced(x, group)  # noqa: F821

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
