"""Step 3: every rank adds its share of the bias"""

from torch.nn import functional as F

STEP, HINT = 3, "bias_each"


class RowLinear:
    def forward(self, x):
        part = F.linear(x, self.weight, self.bias / self.grid.tp)
        return sum_over_shards(part, self.grid)  # noqa: F821
