"""This program shows what happens if forward stores the log-sum-exp in base 2.

Backward reads it as a natural logarithm. The output is right, but the gradients are finite and
wrong. One line checks this: the recomputed weights of a row must sum to 1. Look at the sums of
the weights, and at the cosine, which is nearly 1 although the gradient is wrong.
"""

import math

import torch


# --8<-- [start:both]
def forward(q, k, v):
    """Attention with exp2, as in kernels; the returned log-sum-exp is in base 2."""
    z = q @ k.T * q.shape[-1] ** -0.5 * math.log2(math.e)
    m = z.max(-1).values
    p = (z - m[:, None]).exp2()
    return p @ v / p.sum(-1)[:, None], m + p.sum(-1).log2()


def recomputed(q, k, lse):
    """Recompute the weights as in a backward that expects natural logarithms."""
    return (q @ k.T * q.shape[-1] ** -0.5 - lse[:, None]).exp()


# --8<-- [end:both]


def gradient_of_v(q, k, lse, do):
    return recomputed(q, k, lse).T @ do


def error_and_cosine(found, truth):
    """Return the relative error, and the cosine of the angle between both tensors."""
    error = (found - truth).norm() / truth.norm()
    return error.item(), ((found * truth).sum() / found.norm() / truth.norm()).item()


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
        error, cosine = error_and_cosine(dv, truth)
        print(
            f"{name:7}  weights sum to {sums.min():.2f} to {sums.max():.2f}; "
            f"dV: relative error ≈{error:.1e}, cosine ≈{cosine:.3f}"
        )
        assert cosine > 0.97  # the direction alone would pass
        assert error < 1  # the weights are too small, so a part of dV is missing
    # a test of the direction does find an opposite gradient, and the gradient of other keys
    assert math.isclose(error_and_cosine(-truth, truth)[1], -1, rel_tol=1e-4)
    assert abs(error_and_cosine(truth.flip(0), truth)[1]) < 0.5
    assert error < 1e-5 and (sums - 1).abs().max() < 1e-4
    wrong = recomputed(q, k, lse2)
    assert wrong.sum(-1).max() < 0.5
    natural = torch.logsumexp(q @ k.T / 4, -1)  # each row is off by one factor: e^(-0.44 lse)
    factor = torch.exp((1 - 1 / math.log(2)) * natural)
    torch.testing.assert_close(wrong / weights, factor[:, None].expand_as(wrong))


if __name__ == "__main__":
    main()
