"""Stochastic rounding from fp32 to bf16 is right on average, and small updates add up.

Add a random number of 16 bits to the bits of an fp32, and then cut off the lower 16 bits. The
result is the upper neighbour with a probability that equals the fraction of the step above the
lower neighbour. So the expected value is x itself. Look at the last two lines: with rounding to
nearest, 10,000 small updates leave the weight at 1.
"""

import torch


def stochastic_bf16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 `x` up or down to bf16. `noise` has x's shape and is uniform on 0 … 65535."""
    bits = x.view(torch.int32) + noise.to(torch.int32)  # a carry has probability ℓ/65536
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def main() -> None:
    # the exact expected value: the mean over all 65,536 values of the noise
    every = torch.arange(2**16)
    generator = torch.Generator().manual_seed(0)
    for x in torch.randn(64, generator=generator):
        mean = stochastic_bf16(x.expand(2**16).contiguous(), every).double().mean()
        assert mean.item() == x.item()  # both sides are exact in float64
    print("64 random x: the mean over all 65,536 values of the noise is exactly x")

    draws = 100_000
    print(f"{draws:,} draws        goes up  expected   |mean - x| in standard errors")
    for fraction in (0.01, 0.25, 0.5, 0.9):
        x = torch.full((draws,), 1 + fraction * 2**-7)
        noise = torch.randint(0, 2**16, (draws,), generator=generator)
        rounded = stochastic_bf16(x, noise)
        up = (rounded > x).double().mean().item()
        off = (rounded.double().mean() - x[0].double()).abs().item()
        error = (fraction * (1 - fraction) / draws) ** 0.5 * 2**-7  # of a Bernoulli's mean
        assert off < 5 * error and rounded.unique().tolist() == [1, 1 + 2**-7]
        assert abs(rounded.double().std().item() / draws**0.5 / error - 1) < 0.05
        print(f"1 + {fraction:4} steps        ≈{up:.3f}  {fraction:8.3f}   ≈{off / error:.1f}")

    steps, update = 10_000, 1e-4  # an update is 1/78 of the step above 1
    updates = torch.tensor([update, 0.5 * 2**-7, 0.6 * 2**-7])  # 1/78, 1/2 and 0.6 of a step
    nearest = torch.ones(3, dtype=torch.bfloat16)
    stochastic = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(steps):
        nearest = (nearest.float() + updates).bfloat16()
        noise = torch.randint(0, 2**16, (1000,), generator=generator)
        stochastic = stochastic_bf16(stochastic.float() + update, noise)
    mean, spread = stochastic.double().mean().item(), stochastic.double().std().item()
    assert nearest.tolist() == [1, 1, 2] and abs(mean - 2) < 0.01  # above 2, steps are larger
    p = update / 2**-7  # the probability that one update moves a weight by one step
    assert abs(spread / ((steps * p * (1 - p)) ** 0.5 * 2**-7) - 1) < 0.15
    print(f"1 + {steps:,} × {update}, to nearest:   {nearest[0].item():.3f}")
    print(f"1 + {steps:,} × {update}, stochastic:  ≈{mean:.3f}, one run off by ≈{spread:.3f}")


if __name__ == "__main__":
    main()
