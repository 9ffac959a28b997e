"""This program shows incoherent processing: a rotation before fp8 that spreads outliers.

Q and K are multiplied by the same orthogonal matrix M, which consists of random signs and a
Hadamard matrix, as in FlashAttention-3 (arXiv 2407.08608, section 3.3). The scores do not
change, because (QM)(KM)ᵀ = QKᵀ. But after the rotation no entry is much larger than the others.
Look at the worst error of a score and at the error of the output. The weights of the second
product are rounded to fp8, too. The inputs are those of the paper's section 4.3.
"""

import math

import torch

S, D, TILE = 2048, 128, 64
LARGEST = torch.finfo(torch.float8_e4m3fn).max


# --8<-- [start:rotate]
def hadamard(n: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix: entries ±1/√n, orthogonal rows, n a power of two."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def to_fp8(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Round to E4M3 with one scale for each block of rows, and convert back."""
    blocks = x.reshape(-1, rows, x.shape[-1])
    scale = blocks.abs().amax((1, 2), keepdim=True) / LARGEST
    scale = scale.clamp(min=torch.finfo(x.dtype).tiny)  # a block of zeros stays zero
    return ((blocks / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale).reshape(x.shape)


# --8<-- [end:rotate]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    q, k, v = (torch.randn(S, D) for _ in range(3))
    for x in (q, k, v):  # one entry in a thousand is ten times larger
        x.add_(torch.randn(S, D) * 10 * (torch.rand(S, D) < 0.001))
    # each has about 262 outliers, and more than half of them are larger than 6
    assert all(100 < (x.abs() > 6).sum() < 200 for x in (q, k, v))
    truth = (q.double() @ k.double().T / D**0.5).softmax(-1) @ v.double()
    rotation = torch.randn(D).sign()[:, None] * hadamard(D)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(D), atol=1e-5, rtol=0)
    assert torch.allclose(rotation.abs(), torch.full((D, D), D**-0.5))  # spreads evenly
    # without the signs, the rotation would collect equal entries in a single one
    assert (torch.ones(D) @ rotation).abs().max() < 0.5 * D**0.5
    spoilt = q.clone()
    spoilt[0, 0] = 1e3  # an outlier makes its own block less exact, or the whole tensor
    same = [to_fp8(x, rows)[TILE:] for x in (q, spoilt) for rows in (TILE, S)]
    assert torch.equal(same[0], same[2]) and not torch.equal(same[1], same[3])
    errors, averages, tails = {}, [], []
    print("                       largest of Q   scores: relative, worst   output RMSE")
    for name, rows, turn in (
        ("one scale for each tensor", S, torch.eye(D)),
        ("one scale for 64 rows", TILE, torch.eye(D)),
        ("one scale, rotated", S, rotation),
        ("64 rows, rotated", TILE, rotation),
    ):
        x, y, w = to_fp8(q @ turn, rows), to_fp8(k @ turn, rows), to_fp8(v, rows)
        scores = x @ y.T / D**0.5
        weights = torch.exp(scores - scores.amax(1, keepdim=True))
        eight = (weights * 256).to(torch.float8_e4m3fn).float() / 256  # 256 fits below 448
        out = eight @ w / weights.sum(1, keepdim=True)
        wrong = (x @ y.T - q @ k.T) / D**0.5
        relative = (wrong.norm() / (q @ k.T).norm() * D**0.5).item()
        factors = ((x, q @ turn), (y, k @ turn), (w, v), (eight, weights))
        rounding = [((a - b).norm() / b.norm()).item() for a, b in factors]
        for a, b in factors[:3]:  # the largest entry of a block that has its own scale is exact
            largest = [t.reshape(-1, TILE * D).abs().amax(1) for t in (a, b)]
            assert torch.allclose(*largest, rtol=1e-5, atol=0) == (rows == TILE)
        assert min(rounding) > 0.01 and max(rounding) < 0.05, "all four are rounded to fp8"
        assert 0.9 < relative / math.hypot(*rounding[:2]) < 1.1  # both errors, independent
        errors[name] = (out - truth).square().mean().sqrt().item()
        largest, worst = (q @ turn).abs().max(), wrong.abs().max()
        averages.append(relative)
        tails.append(worst.item())
        print(
            f"{name:26} ≈{largest:2.0f}          ≈{relative:.1%}, ≈{worst:.1f}"
            f"              ≈{errors[name]:.1e}"
        )
    baseline, block, rotated, both = errors.values()
    assert both < rotated < 0.7 * baseline and both < 0.7 * block
    assert (q @ rotation).abs().max() < 0.4 * q.abs().max()
    assert max(averages) < 1.1 * min(averages) and max(tails[2:]) < 0.7 * min(tails[:2])
    print(f"per tensor / per block and rotated: ≈{baseline / both:.1f}")


if __name__ == "__main__":
    main()
