"""Step 3: the pieces have other names"""

STEP, HINT = 3, "no_pieces"


class ColumnLinear:
    def __init__(self, full, grid):
        super().__init__()
        self.grid = grid
        self.w, self.b = cut(full.weight, 0, grid), cut(full.bias, 0, grid)  # noqa: F821
