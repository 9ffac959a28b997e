"""Running values in bf16: a counter stops at 256, a mean is wrong, an average never moves.

No error is raised. 256 + 1 is halfway between 256 and 258, and the tie goes to 256, because the
last bit of its mantissa is 0.
"""

import torch

BF16, FP32 = torch.bfloat16, torch.float32
BATCHES, DECAY = 1000, 0.999


def mean_loss(dtype: torch.dtype) -> tuple[float, float]:
    """Count the batches, and average losses that alternate between 3 and 1 (the mean is 2)."""
    count, total = torch.zeros((), dtype=dtype), torch.zeros((), dtype=dtype)
    for batch in range(BATCHES):
        count += 1
        total += torch.tensor(1.0 if batch % 2 else 3.0, dtype=dtype)
    return count.item(), (total / count).item()


def total_of(losses: torch.Tensor, dtype: torch.dtype) -> float:
    """Add fp32 or bf16 losses, [n], in place to a total of this dtype."""
    total = torch.zeros((), dtype=dtype)
    for loss in losses:
        total += loss
    return total.item()


def average(dtype: torch.dtype) -> float:
    """Return a moving average of a weight that jumped from 1 to 1.5, after 5,000 steps."""
    weight, ema = torch.tensor(1.5, dtype=dtype), torch.tensor(1.0, dtype=dtype)
    for _ in range(5000):
        ema.lerp_(weight, 1 - DECAY)
    return ema.item()


def main() -> None:
    print("        batches counted   mean loss   moving average")
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        count, mean = mean_loss(dtype)
        ema = average(dtype)
        print(f"{name}    {count:15.0f}   {mean:9.3f}   {ema:14.3f}")
        right = BATCHES, 2.0, 1.5 - 0.5 * DECAY**5000
        found = torch.tensor([count, mean, ema], dtype=torch.float64)
        expected = torch.tensor((256, 4, 1) if dtype is BF16 else right, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    print(f"right   {BATCHES:15}   {right[1]:9.3f}   {right[2]:14.3f}")
    losses = torch.tensor([3.0, 1.0] * (BATCHES // 2))
    names, totals = {BF16: "bf16", FP32: "fp32"}, []
    for terms, dtype in ((losses, BF16), (losses.bfloat16(), FP32)):
        totals.append(total_of(terms, dtype))
        print(f"{names[dtype]} total += {names[terms.dtype]} loss: {totals[-1]:.0f}")
    assert totals == [1024, 2 * BATCHES]


if __name__ == "__main__":
    main()
