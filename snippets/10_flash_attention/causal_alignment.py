"""This program shows which keys a query sees if is_causal is used with a cache.

With a cache there are fewer queries than keys. The mask of is_causal starts at the top left, so
the first new token sees only the oldest key. There is no warning. The values are rows of the
identity matrix, so the output is equal to the attention weights.
"""

import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right


def seen(weights: torch.Tensor) -> list[str]:
    """One string for each query: a block for every key with a weight above zero."""
    return ["".join("█" if w > 0 else "·" for w in row) for row in weights[0, 0].tolist()]


def main() -> None:
    warnings.simplefilter("error")  # PyTorch gives no warning
    torch.manual_seed(0)
    cached, new = 8, 3  # keys in the cache, of which the last three belong to the new tokens
    q, k = torch.randn(1, 1, cached, 16), torch.randn(1, 1, cached, 16)
    v = torch.eye(cached).view(1, 1, cached, cached)
    truth = F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, -new:]

    # --8<-- [start:calls]
    last = q[:, :, -new:]  # the new tokens' queries
    wrong = F.scaled_dot_product_attention(last, k, v, is_causal=True)
    right = F.scaled_dot_product_attention(last, k, v, causal_lower_right(new, cached))
    mask = torch.ones(new, cached, dtype=torch.bool).tril(diagonal=cached - new)
    explicit = F.scaled_dot_product_attention(last, k, v, attn_mask=mask)

    one_wrong = F.scaled_dot_product_attention(q[:, :, -1:], k, v, is_causal=True)
    one_right = F.scaled_dot_product_attention(q[:, :, -1:], k, v)  # the newest sees all
    # --8<-- [end:calls]

    torch.testing.assert_close(right, truth)
    torch.testing.assert_close(explicit, truth)
    torch.testing.assert_close(one_right, truth[:, :, -1:])
    two = (last[0, 0, 1] @ k[0, 0, :2].T / 4).softmax(-1)  # the second new token sees two keys
    torch.testing.assert_close(wrong[0, 0, 1, :2], two)
    assert (wrong - truth).abs().max() > 0.1
    assert torch.equal(one_wrong[0, 0, 0], v[0, 0, 0]), "all the weight lies on the first key"
    print("tokens 5, 6 and 7 of 8     is_causal   causal_lower_right")
    for token, a, b in zip((5, 6, 7), seen(wrong), seen(right), strict=True):
        print(f"token {token} sees keys          {a}    {b}")
    print("one token, is_causal      ", seen(one_wrong)[0], "  without", seen(one_right)[0])


if __name__ == "__main__":
    main()
