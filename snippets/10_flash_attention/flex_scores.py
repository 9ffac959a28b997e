"""FlexAttention's score_mod: ALiBi, soft-capping and a table of relative biases, a line each.

Each changes a score before softmax and is compared with attention that holds all scores. What
SDPA needs for ALiBi is a bias of a·s² numbers; score_mod computes it from the two indices.
"""

import warnings

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

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
    plain = flex_attention(q, k, v)
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

    # a key that falls behind by 1/slope loses a factor e of its weight
    print("tokens until a weight falls by e:", [round(1 / x) for x in slopes.tolist()])


if __name__ == "__main__":
    main()
