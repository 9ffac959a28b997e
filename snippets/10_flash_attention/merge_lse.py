"""The log-sum-exp as a second output: merging, a shared prefix read once, and sinks.

An output and its lse are attention's whole state. Two of them merge into one, in any order.
"""

import math

import torch

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


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q = torch.randn(B, A, 1, D)  # 16 requests, one token each
    prefix_k, prefix_v = torch.randn(A, PREFIX, D), torch.randn(A, PREFIX, D)
    own_k, own_v = torch.randn(B, A, OWN, D), torch.randn(B, A, OWN, D)
    whole_k, whole_v = (
        torch.cat([prefix.expand(B, A, PREFIX, D), own], dim=2)
        for prefix, own in ((prefix_k, own_k), (prefix_v, own_v))
    )
    truth, truth_lse = attend(q, whole_k, whole_v)

    a, b, c = (
        attend(q, k, v)
        for k, v in zip(whole_k.split(200, 2), whole_v.split(200, 2), strict=True)
    )
    for way in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(c, merge(b, a))):
        torch.testing.assert_close(way, (truth, truth_lse), rtol=1e-4, atol=1e-5)
    none = attend(q, whole_k[:, :, :0], whole_v[:, :, :0])
    torch.testing.assert_close(merge(merge(none, none), a), a)
    print("three parts merged as (ab)c, a(bc) and c(ba): attention to all keys, and its lse")

    # --8<-- [start:shared]
    # the requests' queries become the rows of one matrix: [b, a, 1, d] -> [a, b, d]
    out, lse = attend(q[:, :, 0].transpose(0, 1), prefix_k, prefix_v)
    shared = out.transpose(0, 1)[:, :, None], lse.transpose(0, 1)[:, :, None]
    cascade, _ = merge(shared, attend(q, own_k, own_v))
    # --8<-- [end:shared]
    torch.testing.assert_close(cascade, truth, rtol=1e-4, atol=1e-5)
    plain = whole_k.nbytes + whole_v.nbytes
    once = sum(x.nbytes for x in (prefix_k, prefix_v, own_k, own_v))
    assert plain * (PREFIX + B * OWN) == once * B * (PREFIX + OWN)
    print(f"shared prefix: {once / 2**20:.2f} MiB of keys and values read, not", end=" ")
    print(f"{plain / 2**20:.2f}: {plain / once:.1f} times less, the same output")

    # --8<-- [start:sink]
    sink = 4 + torch.randn(A, 1, 1)  # a learned logit per head, with no value behind it
    with_sink = torch.sigmoid(truth_lse - sink) * truth
    # --8<-- [end:sink]
    scores = torch.cat([q @ whole_k.mT / math.sqrt(D), sink.expand(B, A, 1, 1)], dim=-1)
    expected = torch.softmax(scores, dim=-1)[..., :-1] @ whole_v
    torch.testing.assert_close(with_sink, expected, rtol=1e-4, atol=1e-5)
    assert (with_sink - truth).abs().max() > 1e-3
    print("a sink: the output times sigmoid(lse - sink) equals one more column in the softmax")


if __name__ == "__main__":
    main()
