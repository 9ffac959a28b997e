"""Step 3: the parts are not added"""

from torch.nn import functional as F

STEP, HINT = 3, "row_not_summed"


class RowLinear:
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
