"""Forward hands over the log-sum-exp in base 2, backward reads it as natural: weights off.

The output is right, the gradients are finite and wrong. The check costs one line: recomputed
weights of a row sum to 1.
"""

import math

import torch


# --8<-- [start:both]
def forward(q, k, v):
    """With exp2, as kernels do; the statistic that is left at the end is in base 2."""
    z = q @ k.T * q.shape[-1] ** -0.5 * math.log2(math.e)
    m = z.max(-1).values
    p = (z - m[:, None]).exp2()
    return p @ v / p.sum(-1)[:, None], m + p.sum(-1).log2()


def recomputed(q, k, lse):
    """What a backward in natural logarithms starts with."""
    return (q @ k.T * q.shape[-1] ** -0.5 - lse[:, None]).exp()


# --8<-- [end:both]


def gradient_of_v(q, k, lse, do):
    return recomputed(q, k, lse).T @ do


def main() -> None:
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(64, 16) for _ in range(4))
    out, lse2 = forward(q, k, v)
    weights = (q @ k.T / 4).softmax(-1)
    torch.testing.assert_close(out, weights @ v)
    truth = weights.T @ do
    for name, lse in (("base 2", lse2), ("natural", lse2 * math.log(2))):
        sums = recomputed(q, k, lse).sum(-1)
        dv = gradient_of_v(q, k, lse, do)
        error = ((dv - truth).norm() / truth.norm()).item()
        cosine = ((dv * truth).sum() / dv.norm() / truth.norm()).item()
        print(
            f"{name:7}  weights sum to {sums.min():.2f} to {sums.max():.2f}; "
            f"dV: relative error ≈{error:.1e}, cosine ≈{cosine:.3f}"
        )
        assert cosine > 0.97  # the direction alone would pass
        assert error < 1  # weights too small leave a part of dV
    assert error < 1e-5 and (sums - 1).abs().max() < 1e-4
    wrong = recomputed(q, k, lse2).sum(-1)
    assert wrong.max() < 0.5


if __name__ == "__main__":
    main()
