"""Step 4: rows and columns stay"""

STEP, HINT = 4, "transposed"


class SparseProduct:
    @staticmethod
    def backward(ctx, grad):
        values, rows, cols, dense = ctx.saved_tensors
        grad_values = (grad[rows] * dense[cols]).sum(1)
        at = cols % len(grad)
        grad_dense = torch.zeros_like(dense).index_add_(0, rows, values[:, None] * grad[at])
        return grad_values, None, None, grad_dense, None
