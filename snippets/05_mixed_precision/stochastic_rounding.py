"""Stochastic rounding from fp32 to bf16: right on average, where rounding to nearest is not.

Add 16 random bits to an fp32, then cut its lower 16: it goes up with a probability that is the
part cut off, so the expected value is x itself. Updates too small for one step then add up.
"""

import torch


def stochastic_bf16(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Round fp32 `x` up or down to bf16; `noise` is uniform on 0 … 65535, of x's shape."""
    bits = x.view(torch.int32) + noise.to(torch.int32)  # carries with probability low/65536
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def main() -> None:
    # the expected value, exactly: all 65,536 noises there are
    every = torch.arange(2**16)
    generator = torch.Generator().manual_seed(0)
    for x in torch.randn(64, generator=generator):
        mean = stochastic_bf16(x.expand(2**16).contiguous(), every).double().mean()
        assert mean.item() == x.item()  # both sides are exact in float64
    print("64 random x, mean over all 65,536 noises: x, exactly")

    draws = 100_000
    print(f"{draws:,} draws        goes up  expected   |mean - x| in standard errors")
    for fraction in (0.01, 0.25, 0.5, 0.9):
        x = torch.full((draws,), 1 + fraction * 2**-7)
        noise = torch.randint(0, 2**16, (draws,), generator=generator)
        rounded = stochastic_bf16(x, noise)
        up = (rounded > x).double().mean().item()
        off = (rounded.double().mean() - x[0].double()).abs().item()
        error = (fraction * (1 - fraction) / draws) ** 0.5 * 2**-7  # of a Bernoulli's mean
        assert off < 5 * error
        assert abs(rounded.double().std().item() / draws**0.5 / error - 1) < 0.05
        print(f"1 + {fraction:4} steps        ≈{up:.3f}  {fraction:8.3f}   ≈{off / error:.1f}")

    steps, update = 10_000, 1e-4  # 1 + 10,000 × 0.0001 = 2, in steps of 1/78 of bf16's at 1
    updates = torch.tensor([update, 2**-7])  # and a whole step, which is not lost
    nearest = torch.ones(2, dtype=torch.bfloat16)
    stochastic = torch.ones(1000, dtype=torch.bfloat16)
    for _ in range(steps):
        nearest = (nearest.float() + updates).bfloat16()
        noise = torch.randint(0, 2**16, (1000,), generator=generator)
        stochastic = stochastic_bf16(stochastic.float() + update, noise)
    mean, spread = stochastic.double().mean().item(), stochastic.double().std().item()
    assert nearest.tolist() == [1, 2] and abs(mean - 2) < 0.01  # at 2 the steps double
    print(f"1 + {steps:,} × {update}, to nearest:   {nearest[0].item():.3f}")
    print(f"1 + {steps:,} × {update}, stochastic:  ≈{mean:.3f}, one run off by ≈{spread:.3f}")


if __name__ == "__main__":
    main()
