"""This program compares scaled_dot_product_attention with a definition of a few lines.

The definition stores all scores, and the function does not have to. The program tries every
argument except dropout_p. In each case the function must equal the definition in float64.
"""

import math

import torch
from torch.nn import functional as F


# --8<-- [start:definition]
def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """q [b, a, s_q, d], k [b, a_kv, s_k, d], v [b, a_kv, s_k, d_v] -> [b, a, s_q, d_v]."""
    if enable_gqa:  # a/a_kv neighbouring query heads use one key head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:  # query i sees keys 0 to i
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # True: the key takes part
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:  # a float mask is added to the scores
        scores = scores + attn_mask
    return torch.softmax(scores, dim=-1) @ v


# --8<-- [end:definition]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q = torch.randn(2, 8, 48, 16)
    k, v = torch.randn(2, 8, 48, 16), torch.randn(2, 8, 48, 16)
    few_k, few_v = torch.randn(2, 2, 48, 16), torch.randn(2, 2, 48, 16)
    long_k, long_v = torch.randn(2, 8, 80, 16), torch.randn(2, 8, 80, 24)
    padding = torch.ones(2, 1, 1, 48, dtype=torch.bool)
    padding[0, ..., 40:] = False  # broadcast over heads and queries
    bias = torch.randn(8, 48, 48)

    # --8<-- [start:cases]
    cases = {
        "nothing but q, k, v": ((q, k, v), {}),
        "is_causal=True": ((q, k, v), {"is_causal": True}),
        "boolean attn_mask [2, 1, 1, 48]": ((q, k, v), {"attn_mask": padding}),
        "float attn_mask [8, 48, 48]": ((q, k, v), {"attn_mask": bias}),
        "scale=1.0": ((q, k, v), {"scale": 1.0}),
        "80 keys, values of width 24": ((q, long_k, long_v), {}),
        "80 keys, is_causal=True": ((q, long_k, long_v), {"is_causal": True}),
        "enable_gqa=True, 2 key heads": ((q, few_k, few_v), {"enable_gqa": True}),
    }
    # --8<-- [end:cases]
    plain = F.scaled_dot_product_attention(q, k, v)
    for name, (tensors, options) in cases.items():
        out = F.scaled_dot_product_attention(*tensors, **options)
        expected = attention(*(x.double() for x in tensors), **options)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
        if name != "nothing but q, k, v" and out.shape == plain.shape:
            assert (out - plain).abs().max() > 0.1, "the argument did nothing"
        print(f"{name:32} {list(out.shape)!s:16} equal to the definition in float64")
    nothing = padding & False  # a query that sees no key: here the two differ
    assert attention(q, k, v, attn_mask=nothing).isnan().all()
    assert F.scaled_dot_product_attention(q, k, v, attn_mask=nothing).eq(0).all()
    weights = torch.eye(48).expand(2, 8, 48, 48)  # as values they return the weights
    assert attention(q, k, weights, is_causal=True).triu(1).eq(0).all()
    assert attention(q, k, weights, attn_mask=padding)[0, ..., 40:].eq(0).all()


if __name__ == "__main__":
    main()
