"""A mask of large negative numbers: one overflows, one attends to padding, two make NaN.

The row without any key is the one to look at: a finite mask shifts all its scores alike, and
softmax does not notice a shift. A boolean mask has none of these failures.
"""

import torch
from torch.nn import functional as F


def main() -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, 4, 8).half() for _ in range(2))
    v = torch.eye(4, dtype=torch.float16).view(1, 1, 4, 4)  # the output is the weights
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[0] = False  # padding on the left: this query has no key at all
    zeros = torch.zeros(4, 4, dtype=torch.float16)

    # --8<-- [start:values]
    try:
        zeros.masked_fill(~keep, -1e9)
    except RuntimeError as error:
        print(f"-1e9 in fp16: {error}")
    least = torch.finfo(torch.float16).min  # -65504
    finite = zeros.masked_fill(~keep, least)
    twice = finite + finite  # a causal mask and a padding mask, added

    def row(mask: torch.Tensor, attend=F.scaled_dot_product_attention) -> list[float]:
        return [round(w, 2) for w in attend(q, k, v, mask)[0, 0, 0].tolist()]

    def by_hand(q, k, v, mask):
        return torch.softmax(q @ k.mT / 8**0.5 + mask, dim=-1) @ v

    print("no mask at all, SDPA:    ", row(zeros))
    print("finfo.min, SDPA:         ", row(finite))
    print("finfo.min twice, by hand:", row(twice, by_hand))
    print("boolean mask, SDPA:      ", row(keep))
    # --8<-- [end:values]
    weights = F.scaled_dot_product_attention(q, k, v, keep)
    seen = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    assert torch.equal(weights[0, 0] > 0, seen.bool())
    some = by_hand(q, k, v, finite)[..., 1:, :]  # with a key, finite and boolean agree
    torch.testing.assert_close(some, weights[..., 1:, :], rtol=0, atol=0.01)
    torch.testing.assert_close(row(finite), row(zeros), rtol=0, atol=0.02)
    assert torch.tensor(row(twice, by_hand)).isnan().all()
    assert row(keep) == [0.0] * 4


if __name__ == "__main__":
    main()
