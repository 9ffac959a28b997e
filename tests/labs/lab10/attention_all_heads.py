"""Step 4: every rank makes all heads out of its part"""

from torch.nn import functional as F

STEP, HINT = 4, "local_heads"


class ParallelAttention:
    def forward(self, x):
        heads = HEADS  # noqa: F821
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
