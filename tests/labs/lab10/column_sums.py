"""Step 3: columns are added up"""

from torch.nn import functional as F

STEP, HINT = 3, "column_summed"


class ColumnLinear:
    def forward(self, x):
        x = copy_to_shards(x, self.grid)  # noqa: F821
        return sum_over_shards(F.linear(x, self.weight, self.bias), self.grid)  # noqa: F821
