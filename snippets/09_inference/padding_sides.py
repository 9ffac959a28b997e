"""Two prompts of different lengths in one batch: wrong logits without an error, and two fixes.

The logits of a sequence are compared with those of the same sequence alone. With padding on the
right, the last position belongs to the padding. Padding on the left shifts all positions, and
tokens attend to it unless a mask forbids it.
"""

import torch
from torch import nn
from torch.nn import functional as F

HIDDEN, HEADS, PAD = 64, 4, 0


class Model(nn.Module):
    """One block. Positions and a mask are optional."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(37, HIDDEN), nn.Embedding(64, HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, 37)

    def forward(self, ids, positions=None, real=None):  # ids, positions, real: [b, s]
        b, s = ids.shape
        if positions is None:
            positions = torch.arange(s).expand(b, s)
        x = self.token(ids) + self.position(positions)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        seen = torch.ones(s, s, dtype=torch.bool).tril().expand(b, 1, s, s)
        if real is not None:
            seen = seen & real[:, None, None, :]  # no column of padding
            seen = seen | torch.eye(s, dtype=torch.bool)  # a padding row sees itself: no NaN
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), seen)
        return self.out(x + mixed.transpose(1, 2).flatten(2))


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model()
    long, short = torch.randint(1, 37, (12,)), torch.randint(1, 37, (7,))
    truth = model(short[None])[0, -1]

    def off(logits: torch.Tensor) -> float:
        return (logits - truth).abs().max().item()

    # --8<-- [start:right]
    right = torch.stack([long, F.pad(short, (0, 5), value=PAD)])  # [2, 12]
    logits = model(right)
    print(f"padded right, last place read:           off by {off(logits[1, -1]):.2f}")
    print(f"padded right, place 7 - 1 read:          off by {off(logits[1, 7 - 1]):.2f}")
    # --8<-- [end:right]
    assert off(logits[1, -1]) > 0.1 and off(logits[1, 6]) < 1e-5

    # --8<-- [start:left]
    left = torch.stack([long, F.pad(short, (5, 0), value=PAD)])
    real = left != PAD
    positions = (real.cumsum(1) - 1).clamp(min=0)  # 0 0 0 0 0 0 1 2 3 4 5 6
    for words, arguments in (
        ("padded left, nothing else:", (None, None)),
        ("padded left, mask:", (None, real)),
        ("padded left, positions:", (positions, None)),
        ("padded left, mask and positions:", (positions, real)),
    ):
        print(f"{words:40} off by {off(model(left, *arguments)[1, -1]):.2f}")
    # --8<-- [end:left]
    assert off(model(left)[1, -1]) > 0.05 and off(model(left, None, real)[1, -1]) > 0.05
    assert off(model(left, positions)[1, -1]) > 0.01
    assert off(model(left, positions, real)[1, -1]) < 1e-5

    alone = model(left, positions, real)[0, -1] - model(long[None])[0, -1]
    assert alone.abs().max() < 1e-5
    x = torch.randn(1, 1, 3, 4)
    empty = torch.ones(3, 3, dtype=torch.bool).tril() & torch.tensor([False, True, True])
    scores = (x @ x.transpose(2, 3)).masked_fill(~empty, -torch.inf)
    shares = scores.softmax(-1)[0, 0]
    nan = bool(shares[0].isnan().all())
    assert not shares[1:].isnan().any()
    assert (shares[1:] @ (shares @ x[0, 0])).isnan().all(), "0 · NaN is NaN in the next layer"
    print(f"a row that sees nothing, softmaxed by hand: NaN {nan}")
    assert nan
    mixed = F.scaled_dot_product_attention(x, x, x, attn_mask=empty)[0, 0]
    print(f"the same row by scaled_dot_product_attention: {mixed[0].abs().max():.0f}")
    assert not mixed.isnan().any() and mixed[1:].abs().min() > 0


if __name__ == "__main__":
    main()
