"""`is_causal=True` with a cache: the mask starts at the wrong corner, and no error is raised.

torch aligns the triangle with the upper left corner: query 0 sees only key 0. With a cache,
query 0 is the newest token, and it must see every key.
"""

import torch
from torch.nn import functional as F


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 32, 16) for _ in range(3))  # [b, a, s, d]
    right = F.scaled_dot_product_attention(q, k, v, is_causal=True)

    # --8<-- [start:one]
    newest = q[:, :, -1:]  # one query, 32 keys in the cache
    wrong = F.scaled_dot_product_attention(newest, k, v, is_causal=True)
    print(f"one new token, is_causal=True: equals value 0 of the cache: "
          f"{torch.allclose(wrong, v[:, :, :1])}")  # fmt: skip
    assert torch.allclose(wrong, v[:, :, :1])
    fixed = F.scaled_dot_product_attention(newest, k, v)  # it may see everything: no mask
    torch.testing.assert_close(fixed, right[:, :, -1:])
    print("one new token, no mask: right")
    # --8<-- [end:one]

    # --8<-- [start:several]
    newest = q[:, :, -5:]
    wrong = F.scaled_dot_product_attention(newest, k, v, is_causal=True)
    off = (wrong - right[:, :, -5:]).abs().max().item()
    print(f"five new tokens, is_causal=True: off by up to {off:.2f}")
    assert off > 0.5
    seen = torch.ones(5, 32, dtype=torch.bool).tril(32 - 5)  # the triangle at the lower right
    fixed = F.scaled_dot_product_attention(newest, k, v, attn_mask=seen)
    torch.testing.assert_close(fixed, right[:, :, -5:])
    print("five new tokens, tril(32 - 5): right")
    # --8<-- [end:several]

    from torch.nn.attention.bias import causal_lower_right

    fixed = F.scaled_dot_product_attention(newest, k, v, attn_mask=causal_lower_right(5, 32))
    torch.testing.assert_close(fixed, right[:, :, -5:])
    print("five new tokens, causal_lower_right(5, 32): right")


if __name__ == "__main__":
    main()
