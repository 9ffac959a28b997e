"""Step 4: entries of one row overwrite each other"""

STEP, HINT = 4, "repeated"


class SparseProduct:
    @staticmethod
    def forward(ctx, values, rows, cols, dense, m: int):
        ctx.save_for_backward(values, rows, cols, dense)
        out = dense.new_zeros(m, dense.shape[1])
        out[rows] += values[:, None] * dense[cols]
        return out
