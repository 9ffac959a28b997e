"""Step 4: the values stay in their gradient"""

STEP, HINT = 4, "values"


class SparseProduct:
    @staticmethod
    def backward(ctx, grad):
        values, rows, cols, dense = ctx.saved_tensors
        grad_values = values * (grad[rows] * dense[cols]).sum(1)
        grad_dense = torch.zeros_like(dense).index_add_(0, cols, values[:, None] * grad[rows])
        return grad_values, None, None, grad_dense, None
