"""This program shows two savings of FlashAttention-4: a polynomial for 2^x and rare rescaling.

The coefficients and the threshold are those of the paper (arXiv 2603.05451, sections 3.1.3 and
3.1.4). A row keeps its old maximum until a new maximum is larger by more than the threshold.
Scores are in base 2, so with a threshold of 8 a weight is at most 2^8. Look at the columns
"rescaled" and "error of the output".
"""

import math
from collections.abc import Callable

import torch

QUERIES, KEYS, D, TILE, WARP = 256, 4096, 64, 64, 32


# --8<-- [start:exp2]
def polynomial(x: torch.Tensor) -> torch.Tensor:
    """2^x in fp32 for x below 128: exponent bits for the whole part, a cubic for the rest."""
    x = x.clamp(min=-127)
    whole = x.floor()
    f = x - whole  # in [0, 1), so that 2^f in [1, 2) has the exponent of 1
    two_f = 1 + f * (0.695146143 + f * (0.227564394 + f * 0.077119089))
    return (two_f.view(torch.int32) + (whole.int() << 23)).view(torch.float32)


# --8<-- [end:exp2]


# --8<-- [start:attention]
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    threshold: float,
    exp2: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Return output, log-sum-exp, fraction of tiles that a warp rescales, largest weight."""
    m = q.new_full((len(q), 1), -torch.inf, dtype=torch.float32)
    total, out = torch.zeros_like(m), m.new_zeros(len(q), v.shape[1])
    rescaled, largest, tiles = 0, 0.0, math.ceil(len(k) / TILE)
    for j in range(tiles):
        keys = slice(j * TILE, (j + 1) * TILE)
        scores = q.float() @ k[keys].float().T * (math.log2(math.e) / math.sqrt(q.shape[1]))
        new = torch.maximum(m, scores.amax(1, keepdim=True))
        behind = new - m > threshold  # each row decides whether it takes the new maximum
        new = torch.where(behind, new, m)
        shrink = exp2(m - new) if j else torch.zeros_like(m)  # 1 where nothing changes
        warps = torch.stack([rows.any() for rows in behind.split(WARP)])  # one row is enough
        rescaled += warps.sum().item() if j else 0
        m = new
        p = exp2(scores - m)
        total = total * shrink + p.sum(1, keepdim=True)
        out = out * shrink + p.bfloat16().float() @ v[keys].float()
        largest = max(largest, p.max().item())
    lse = (m + total.log2()) / math.log2(math.e)
    return out / total, lse[:, 0], rescaled / (len(warps) * max(1, tiles - 1)), largest


# --8<-- [end:attention]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # tile j of independent scores has a new maximum for a row with probability 1/j
    tiles = KEYS // TILE
    predicted = sum(1 - (1 - 1 / j) ** WARP for j in range(2, tiles + 1)) / (tiles - 1)
    x = torch.rand(2**18) * -30
    exact = x.double().exp2()
    print("2^x                       in fp32    rounded to bf16")
    for name, exp2 in (("torch.exp2", torch.exp2), ("cubic polynomial", polynomial)):
        errors = [
            ((y.double() - exact) / exact).abs().max().item()
            for y in (exp2(x), exp2(x).bfloat16())
        ]
        # the error in fp32 depends on the vector instructions of the processor
        fp32 = f"≈{errors[0]:.1e}"
        print(f"{name:22}{fp32:>11}{errors[1]:19.1e}")
    assert errors[0] < 1e-4 and errors[1] < 2**-8 + 1e-4  # the paper's table 2 has 8.8e-5
    # masked scores are -inf, and with a threshold x can be positive
    ends = torch.tensor([-torch.inf, -1000.0, -150.5, -125.7, 7.9, 127.9])
    torch.testing.assert_close(polynomial(ends), torch.exp2(ends), rtol=1e-4, atol=2**-126)
    same = (polynomial(x).bfloat16() == torch.exp2(x).bfloat16()).float().mean().item()
    print(f"the same bf16 number for {same:.0%} of them")

    print(
        "\nscores       2^x          threshold  rescaled  largest weight  error of the output"
    )
    for title, scale in (("normal", 1.0), ("4 × normal", 4.0)):
        q, k, v = (torch.randn(n, D).bfloat16() for n in (QUERIES, KEYS, KEYS))
        q = q * scale
        scores = q.double() @ k.double().T / math.sqrt(D)
        truth, lse = scores.softmax(1) @ v.double(), scores.logsumexp(1)
        found = {}
        for name, exp2, threshold in (
            ("exp2", torch.exp2, 0.0),
            ("exp2", torch.exp2, 8.0),
            ("polynomial", polynomial, 8.0),
        ):
            out, ours, share, largest = attention(q, k, v, threshold, exp2)
            error = ((out - truth).norm() / truth.norm()).item()
            torch.testing.assert_close(ours.double(), lse, rtol=1e-4, atol=1e-3)
            row = f"{title:12} {name:12}{threshold:10.0f}{share:10.1%}{largest:16.1f}"
            print(f"{row}{error:21.2%}")
            found[name, threshold] = share, largest, error
        rare, often = found["exp2", 8.0], found["exp2", 0.0]
        assert often[1] == 1 < rare[1] <= 2**8 and rare[0] < often[0] / 3
        assert abs(often[0] - predicted) < 0.02  # every new maximum, and nothing else
        assert often[2] < rare[2]  # the largest weight is no longer exactly 1
        assert (
            math.isclose(found["polynomial", 8.0][2], rare[2], rel_tol=0.05) and rare[2] < 2**-9
        )


if __name__ == "__main__":
    main()
