"""Step 4: the matrix is made"""

STEP, HINT = 4, "dense"


class SparseProduct:
    @staticmethod
    def forward(ctx, values, rows, cols, dense, m: int):
        ctx.save_for_backward(values, rows, cols, dense)
        matrix = dense.new_zeros(m, len(dense))
        return matrix.index_put_((rows, cols), values, accumulate=True) @ dense
