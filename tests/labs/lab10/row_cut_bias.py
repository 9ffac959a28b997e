"""Step 3: the bias of whole outputs is cut"""

STEP, HINT = 3, "row_bias"


class RowLinear:
    def __init__(self, full, grid):
        super().__init__()
        self.grid = grid
        self.weight = cut(full.weight, 1, grid)  # noqa: F821
        self.bias = cut(full.bias, 0, grid)  # noqa: F821
