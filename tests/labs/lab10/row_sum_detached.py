"""Step 3: the sum has no gradient"""

from torch.nn import functional as F

STEP, HINT = 3, "shard_gradient"


class RowLinear:
    def forward(self, x):
        part = F.linear(x, self.weight)
        return all_reduced(part, self.grid.tp_group) + self.bias  # noqa: F821
