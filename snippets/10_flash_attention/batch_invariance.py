"""This program shows why a request can get different bits in a larger batch.

Many decoding kernels cut the keys into enough parts to fill the GPU. In a larger batch, each
request then gets fewer parts. The sums have a different order, so they round differently. Parts
of a fixed size give the same bits for every batch size. The program models only this choice of
parts: it computes one request on the CPU with the parts that each rule chooses.
"""

import math

import torch

SMS, KV_HEADS, D, CONTEXT = 132, 8, 64, 1000


# --8<-- [start:attend]
def attend(q, k, v, part: int) -> torch.Tensor:
    """One query against the keys in parts of `part`; q [1, d], k and v [s, d]."""
    outs, lses = [], []
    for kk, vv in zip(k.split(part), v.split(part), strict=True):
        scores = q @ kk.T / q.shape[1] ** 0.5
        lses.append(scores.logsumexp(-1))
        outs.append(torch.softmax(scores, -1) @ vv)
    lse = torch.stack(lses)  # [parts, 1]
    weights = torch.exp(lse - lse.logsumexp(0))
    return (weights[..., None] * torch.stack(outs)).sum(0)


def part_to_fill(batch: int) -> int:
    """Return the keys of a part, if the parts of all requests and heads fill the SMs once."""
    return math.ceil(CONTEXT / max(1, SMS // (batch * KV_HEADS)))


def part_of_256(batch: int) -> int:
    """Return the same number for every batch, so the neighbours of a request do not matter."""
    return 256


# --8<-- [end:attend]


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q = torch.randn(64, 1, D)  # 64 positions of one request, to have more than one number
    k, v = torch.randn(CONTEXT, D), torch.randn(CONTEXT, D)

    def request(part: int) -> torch.Tensor:
        return torch.stack([attend(row, k, v, part) for row in q])

    exact = torch.softmax(q.double() @ k.double().T / D**0.5, -1) @ v.double()
    print("rule           batch   parts   same bits as alone   largest error")
    for rule in (part_to_fill, part_of_256):
        alone = request(rule(1))
        for batch in (1, 2, 4, 16):
            out = request(rule(batch))
            error = (out - exact).abs().max().item()
            assert error < 1e-5, "every split is right"
            same = torch.equal(out, alone)
            assert same == (batch == 1 or rule is part_of_256)
            parts = math.ceil(CONTEXT / rule(batch))
            filled = {1: 16, 2: 8, 4: 4, 16: 1}[batch]  # 8 heads: 128 blocks, or 1 part each
            assert parts == (filled if rule is part_to_fill else 4)
            print(f"{rule.__name__:14} {batch:5} {parts:7} {same!s:>20}   ≈{error:.1e}")


if __name__ == "__main__":
    main()
