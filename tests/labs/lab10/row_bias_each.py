"""Step 3: every rank adds the bias before the sum"""

from torch.nn import functional as F

STEP, HINT = 3, "bias_each"


class RowLinear:
    def forward(self, x):
        return sum_over_shards(F.linear(x, self.weight, self.bias), self.grid)  # noqa: F821
