"""Step 3: the bias is not cut"""

STEP, HINT = 3, "column_bias"


class ColumnLinear:
    def __init__(self, full, grid):
        super().__init__()
        self.grid = grid
        self.weight = cut(full.weight, 0, grid)  # noqa: F821
        self.bias = whole(full.bias)  # noqa: F821
