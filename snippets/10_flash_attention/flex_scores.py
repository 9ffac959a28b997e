"""This program writes ALiBi, soft-capping and relative biases as functions of one score.

Each score_mod changes a score before the softmax. The results are compared with attention that
stores all scores. For ALiBi, SDPA needs a bias of a·s² numbers, while the score_mod computes
the bias from two indices. The order of capping and masking matters, and the program shows why.
"""

import math
import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

A, S, D, CAP = 8, 128, 16, 5.0


# --8<-- [start:mods]
# Press et al.: head i of n slopes by 2^(-8i/n), the first is steepest
slopes = 2.0 ** (-8 * torch.arange(1, A + 1) / A)


def alibi(score, b, h, q, k):
    return score - slopes[h] * (q - k).abs()


def soft_cap(score, b, h, q, k):  # between -CAP and CAP, whatever the logits do
    return CAP * torch.tanh(score / CAP)


torch.manual_seed(0)
table = torch.randn(A, 2 * S - 1)  # one bias per head and distance


def relative(score, b, h, q, k):
    return score + table[h, q - k + S - 1]


# --8<-- [end:mods]


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    q, k, v = (2 * torch.randn(1, A, S, D) for _ in range(3))
    scores = q @ k.mT / D**0.5
    distance = torch.arange(S)[:, None] - torch.arange(S)
    bias = -slopes[:, None, None] * distance.abs()  # [a, s, s]
    full = {
        "alibi": scores + bias,
        "soft_cap": CAP * torch.tanh(scores / CAP),
        "relative": scores + table[:, distance + S - 1],
    }
    plain = F.scaled_dot_product_attention(q, k, v)
    for mod in (alibi, soft_cap, relative):
        out = flex_attention(q, k, v, score_mod=mod)
        expected = torch.softmax(full[mod.__name__], dim=-1) @ v
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert (out - plain).abs().max() > 0.1
        print(f"{mod.__name__:9} equal to attention that stores its scores")
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    torch.testing.assert_close(out, torch.softmax(full["alibi"], -1) @ v, rtol=1e-4, atol=1e-5)
    print(f"ALiBi as SDPA's attn_mask: {bias.nbytes // 1024} KiB, as slopes: {slopes.nbytes} B")
    print(f"largest score {scores.max():.1f}, soft-capped {full['soft_cap'].max():.2f}")

    future = torch.ones(S, S, dtype=torch.bool).triu(1)
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, S, S, "cpu")
    out = flex_attention(q, k, v, score_mod=soft_cap, block_mask=block_mask)
    capped = full["soft_cap"].masked_fill(future, -torch.inf)
    torch.testing.assert_close(out, torch.softmax(capped, -1) @ v, rtol=1e-4, atol=1e-5)
    # a score_mod cannot bring back a hidden key, so each query averages the values that it sees
    out = flex_attention(
        q, k, v, score_mod=lambda score, b, h, q, k: torch.zeros_like(score),
        block_mask=block_mask,
    )  # fmt: skip
    mean = v.cumsum(2) / torch.arange(1, S + 1)[:, None]
    torch.testing.assert_close(out, mean, rtol=1e-4, atol=1e-5)
    masked_first = CAP * torch.tanh(scores.masked_fill(future, -torch.inf) / CAP)
    leaked = torch.softmax(masked_first, dim=-1)[..., 0, 1:].sum(-1)  # token 0, later keys
    assert torch.softmax(capped, dim=-1)[..., 0, 1:].eq(0).all() and leaked.min() > 0.01
    share = f"up to {100 * leaked.max():.0f}%"
    print(f"soft cap after a causal mask: {share} of the weight of token 0 is on later keys")
    print("soft cap before the mask: 0% of this weight is on later keys")

    # a key that is 1/slope tokens farther away has a weight that is smaller by a factor of e
    first = bias[:6, 0].softmax(-1)  # of token 0, if all scores are 0
    ratios = torch.tensor([row[0] / row[2**h] for h, row in enumerate(first, 1)])
    torch.testing.assert_close(ratios, torch.full((6,), math.e))
    print("tokens until a weight falls by e:", [round(1 / x) for x in slopes.tolist()])


if __name__ == "__main__":
    main()
