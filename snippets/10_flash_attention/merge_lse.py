"""This program merges the attention of several sets of keys by their log-sum-exps.

For each set of keys, attention returns an output and a log-sum-exp (lse). Two such pairs merge
into the pair of the union, in any order. The program uses the merge for parts of a cache, and
for a prefix that several requests share. It also adds an attention sink to a finished output.
The results are compared with PyTorch's own attention kernel over all keys. Plain Python writes
merge_lse.svg, whose weights the merge has computed.
"""

import math

import torch
from torch.nn import functional as F

B, A, PREFIX, OWN, D = 16, 4, 512, 32, 32


# --8<-- [start:merge]
def attend(q, k, v) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse; q [..., s_q, d], k and v [..., s_k, d]."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def merge(first, second) -> tuple[torch.Tensor, torch.Tensor]:
    """Of two disjoint sets of keys, the attention to their union."""
    (out_1, lse_1), (out_2, lse_2) = first, second
    lse = torch.logaddexp(lse_1, lse_2)
    base = lse.masked_fill(lse == -torch.inf, 0)  # no key in either: zeros, not NaN
    return torch.exp(lse_1 - base) * out_1 + torch.exp(lse_2 - base) * out_2, lse


# --8<-- [end:merge]

INK, MUTED, BLUE, GREEN, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#15803d", "#c2410c"


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def rounded(x: float, y: float, width: float, height: float, colour: str, fill: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
        f'fill="{colour}" fill-opacity="{fill}" stroke="{colour}"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{MUTED}" stroke-width="1.8" '
        f'fill="none"/><circle cx="{to_x:g}" cy="{to_y:g}" r="3" fill="{MUTED}"/>'
    )


def draw(lses: list[float], weights: list[float]) -> str:
    """Draw three parts of a cache that are computed side by side and then merged."""
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" '
        'font-family="system-ui, sans-serif" font-size="14">',
        words(360, 18, "the keys and values of one sequence, cut into three parts"),
    ]
    for part, (lse, weight) in enumerate(zip(lses, weights, strict=True)):
        x, small = 27 + 232 * part, "₁₂₃"[part]
        for key in range(8):
            parts.append(rounded(x + 26 * key, 30, 20, 26, BLUE, 0.16))
        middle = x + 101  # the middle of the 202 px wide box
        parts += [arrow(middle, 60, middle, 86), rounded(x, 90, 202, 76, GREEN, 0.12)]
        parts.append(words(middle, 112, f"SM, kernel or rank {part + 1}"))
        parts.append(words(middle, 134, f"softmax over its keys: o{small}"))
        parts.append(words(middle, 156, f"log-sum-exp: Λ{small} = {lse:.1f}"))
        parts.append(arrow(middle, 170, 360 + 120 * (part - 1), 232))
        x_of_weight = middle + (-10, 56, 10)[part]  # next to the arrow
        parts.append(words(x_of_weight, 216, f"weight {weight:.2f}", ORANGE))
    parts += [
        rounded(150, 236, 420, 58, ORANGE, 0.12),
        words(360, 260, "merge: the weight of a part is exp(Λ of the part − Λ)"),
        words(360, 282, "o = weight₁ o₁ + weight₂ o₂ + weight₃ o₃"),
        words(360, 318, "the same output as one softmax over all keys", MUTED),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q = torch.randn(B, A, 1, D)  # 16 requests, one token each
    prefix_k, prefix_v = torch.randn(A, PREFIX, D), torch.randn(A, PREFIX, D)
    own_k, own_v = torch.randn(B, A, OWN, D), torch.randn(B, A, OWN, D)
    own_k[:, :, 5] = 1.3 * q[:, :, 0]  # this key is similar to the query: its part counts more
    whole_k, whole_v = (
        torch.cat([prefix.expand(B, A, PREFIX, D), own], dim=2)
        for prefix, own in ((prefix_k, own_k), (prefix_v, own_v))
    )
    truth = F.scaled_dot_product_attention(q, whole_k, whole_v)  # one softmax over all keys
    scores = torch.einsum("bad,basd->bas", q[:, :, 0].double(), whole_k.double()) / D**0.5
    truth_lse = scores.exp().sum(-1).log().float()[..., None, None]  # [b, a, 1, 1]

    a, b, c = (
        attend(q, k, v)
        for k, v in zip(whole_k.split(200, 2), whole_v.split(200, 2), strict=True)
    )
    for way in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))):
        torch.testing.assert_close(way, (truth, truth_lse), rtol=1e-4, atol=1e-5)
    none = attend(q, whole_k[:, :, :0], whole_v[:, :, :0])
    torch.testing.assert_close(merge(merge(none, none), a), a)
    mean = (a[0] + b[0] + c[0]) / 3
    assert (mean - truth).abs().max() > 0.1, "a plain mean of the parts is wrong"
    first, second, third = ((part[0], torch.zeros_like(part[1])) for part in (a, b, c))
    alike, _ = merge(merge(first, second), third)  # a mean treats all log-sum-exps as equal
    torch.testing.assert_close(alike, mean)
    print("three parts merged as (ab)c, a(bc) and c(ba): attention to all keys, and its lse")

    # --8<-- [start:shared]
    # the requests' queries become the rows of one matrix: [b, a, 1, d] -> [a, b, d]
    out, lse = attend(q[:, :, 0].transpose(0, 1), prefix_k, prefix_v)
    shared = out.transpose(0, 1)[:, :, None], lse.transpose(0, 1)[:, :, None]
    cascade, _ = merge(shared, attend(q, own_k, own_v))
    # --8<-- [end:shared]
    torch.testing.assert_close(cascade, truth, rtol=1e-4, atol=1e-5)
    assert out.shape == (A, B, D)  # one product per head: all requests read the same prefix
    plain = whole_k.nbytes + whole_v.nbytes
    once = sum(x.nbytes for x in (prefix_k, prefix_v, own_k, own_v))
    assert plain * (PREFIX + B * OWN) == once * B * (PREFIX + OWN)
    print(f"shared prefix: {once / 2**20:.2f} MiB of keys and values read, not", end=" ")
    print(f"{plain / 2**20:.2f}: {plain / once:.1f} times less, the same output")

    # --8<-- [start:sink]
    sink = 4 + torch.randn(A, 1, 1)  # a learned logit per head, with no value behind it
    with_sink = torch.sigmoid(truth_lse - sink) * truth
    # --8<-- [end:sink]
    logits = torch.cat([q @ whole_k.mT / math.sqrt(D), sink.expand(B, A, 1, 1)], dim=-1)
    expected = torch.softmax(logits, dim=-1)[..., :-1] @ whole_v
    torch.testing.assert_close(with_sink, expected, rtol=1e-4, atol=1e-5)
    assert (with_sink - truth).abs().max() > 1e-3
    print("a sink: the output times sigmoid(lse - sink) equals one more column in the softmax")

    lses = torch.stack([part[1][0, 0, 0, 0] for part in (a, b, c)])  # of one request and head
    weights = torch.exp(lses - truth_lse[0, 0, 0, 0])
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0), rtol=1e-5, atol=1e-5)
    with open("merge_lse.svg", "w", encoding="utf-8") as file:
        file.write(draw(lses.tolist(), weights.tolist()))


if __name__ == "__main__":
    main()
