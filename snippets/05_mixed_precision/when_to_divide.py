"""In fp16 a mean over ranks can underflow or overflow, and dividing twice by √N avoids both.

The program averages gradients of N ranks. If each gradient is divided by N before the sum,
small gradients become 0. If the sum is divided, large gradients have become inf on the way.
FSDP2 divides fp16 gradients once before and once after the sum, each time by about √N. The
exponent of bf16 has 8 bits, so its mean is finite and not zero in all three cases.
"""

import math

import torch

N, ELEMENTS = 64, 4096


def mean(gradients: torch.Tensor, dtype: torch.dtype, before: float) -> torch.Tensor:
    """Return the mean of [N, elements] over the ranks: divide by `before`, add, divide."""
    total = torch.zeros(ELEMENTS, dtype=dtype)
    for gradient in gradients.to(dtype):
        total += gradient / before
    return total / (N / before)


def main() -> None:
    torch.manual_seed(0)
    print(f"a mean over {N} ranks: share of elements that become 0 / inf")
    print("gradients about     1/N before      1/N after      √N and √N")
    for dtype, name in ((torch.float16, "fp16"), (torch.bfloat16, "bf16")):
        for size in (1e-6, 1e-3, 2e3):
            gradients = torch.normal(size, 0.1 * size, (N, ELEMENTS))
            cells = []
            for before in (N, 1, math.sqrt(N)):
                result = mean(gradients, dtype, before)
                zero, infinite = (result == 0).float().mean(), result.isinf().float().mean()
                cells.append(f"{zero:6.0%} / {infinite:4.0%}")
                fits = dtype is torch.bfloat16 or before not in (N, 1) or size == 1e-3
                if fits:  # twice as large as well
                    assert zero + infinite == 0
                    assert mean(2 * gradients, dtype, before).isfinite().all()
                    exact = gradients.double().mean(0)
                    error = (result - exact).norm() / exact.norm()
                    # every addition rounds to `dtype`, so the error exceeds one rounding
                    assert result.dtype == dtype and torch.finfo(dtype).eps / 2 < error < 0.06
                assert dtype is torch.bfloat16 or (zero == 1) == ((size, before) == (1e-6, N))
                assert dtype is torch.bfloat16 or (infinite == 1) == (
                    (size, before) == (2e3, 1)
                )
            print(f"  {name} {size:8.0e}  {'  '.join(cells)}")


if __name__ == "__main__":
    main()
