"""Step 4: attention without the mask"""

from torch.nn import functional as F

STEP, HINT = 4, "not_causal"


class ParallelAttention:
    def forward(self, x):
        heads = HEADS // self.grid.tp  # noqa: F821
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))
