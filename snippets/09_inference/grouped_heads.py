"""Grouped-query attention from scratch: several query heads share one head of keys and values.

With one group per head it is multi-head attention, and with a single group it is multi-query
attention. The result equals multi-head attention with repeated keys and values, and torch's
own.
"""

import torch
from torch.nn import functional as F


# --8<-- [start:grouped]
def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One decode step: q [b, a, 1, d], k and v [b, a_kv, s, d] -> as q."""
    groups = k.shape[1]
    # [b, a_kv, a/a_kv, d]: a group's queries become the rows of one product
    q = q.unflatten(1, (groups, -1)).squeeze(3)
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5  # [b, a_kv, a/a_kv, s]
    return (scores.softmax(-1) @ v).flatten(1, 2).unsqueeze(2)


# --8<-- [end:grouped]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    b, a, s, d = 2, 8, 100, 32
    q = torch.randn(b, a, 1, d)
    print("groups   cache of 100 tokens   FLOPs per byte of the cache read")
    for kv in (8, 4, 2, 1):
        k, v = torch.randn(2, b, kv, s, d)
        repeated = (t.repeat_interleave(a // kv, 1) for t in (k, v))  # head i reads i // (a/kv)
        expected = F.scaled_dot_product_attention(q, *repeated)
        torch.testing.assert_close(grouped(q, k, v), expected)
        torch.testing.assert_close(
            F.scaled_dot_product_attention(q, k, v, enable_gqa=True), expected
        )
        size = (k.nbytes + v.nbytes) // b
        assert size == 2 * kv * d * s * 4
        flops = 4 * a * d * s  # q·k and weights·v, two each
        print(f"{kv:6}   {size / 1024:15.1f} KiB   "
              f"{flops / (2 * kv * d * s * 2):8.1f} at 2 bytes")  # fmt: skip
    print("equal to repeated heads and to scaled_dot_product_attention(enable_gqa=True)")

    k, v = torch.randn(2, b, 4, s, d)
    wrong = F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1))
    right = grouped(q, k, v)
    off = (wrong - right).abs().amax((0, 2, 3)) > 1e-4
    print(f"repeat in place of repeat_interleave: {int(off.sum())} of {a} heads are wrong")
    assert off.tolist() == [False] + [True] * 6 + [False]


if __name__ == "__main__":
    main()
