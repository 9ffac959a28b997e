"""Step 2: f does not sum in backward"""

STEP, HINT = 2, "f_backward"


class CopyToShards:
    @staticmethod
    def backward(ctx, gradient):
        return gradient, None
