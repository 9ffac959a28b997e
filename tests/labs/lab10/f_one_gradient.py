"""Step 2: one gradient for two arguments"""

STEP, HINT = 2, "gradient_count"


class CopyToShards:
    @staticmethod
    def backward(ctx, gradient):
        return all_reduced(gradient, ctx.group)  # noqa: F821
