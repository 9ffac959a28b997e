"""Step 3: a new parameter without the mark"""

from torch import nn

STEP, HINT = 3, "not_marked"


class ColumnLinear:
    def __init__(self, full, grid):
        super().__init__()
        self.grid = grid
        self.weight = nn.Parameter(cut(full.weight, 0, grid))  # noqa: F821
        self.bias = cut(full.bias, 0, grid)  # noqa: F821
