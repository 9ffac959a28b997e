"""Step 3: no operator where x enters"""

from torch.nn import functional as F

STEP, HINT = 3, "column_input"


class ColumnLinear:
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
