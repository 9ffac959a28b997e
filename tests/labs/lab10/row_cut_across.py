"""Step 3: the outputs are cut in place of the inputs"""

STEP, HINT = 3, "row_dim"


class RowLinear:
    def __init__(self, full, grid):
        super().__init__()
        self.grid = grid
        self.weight = cut(full.weight, 0, grid)  # noqa: F821
        self.bias = whole(full.bias)  # noqa: F821
