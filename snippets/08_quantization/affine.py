"""Affine quantization from scratch: a scale and a zero point map numbers to integers.

x is close to scale · (q - zero point). The range is widened until it contains 0, and the zero
point is rounded to an integer. So 0 is always represented exactly. Compare the columns x and
back: inside the range, the error is at most half a step.
"""

import torch


# --8<-- [start:affine]
def parameters(low: float, high: float, bits: int) -> tuple[float, int]:
    """Return the scale and the zero point that map [low, high] to 0 … 2^bits - 1."""
    low, high = min(low, 0.0), max(high, 0.0)  # the range must contain 0
    scale = (high - low) / (2**bits - 1)
    return scale, round(-low / scale)


def quantize(x: torch.Tensor, scale: float, zero: int, bits: int) -> torch.Tensor:
    """Round to the nearest step, with ties to even, and clamp values outside the range."""
    return (torch.round(x / scale) + zero).clamp(0, 2**bits - 1).to(torch.uint8)


def dequantize(q: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
    return scale * (q.to(torch.int32) - zero)


# --8<-- [end:affine]


def main() -> None:
    torch.set_num_threads(1)
    scale, zero = parameters(-1.0, 2.5, bits=3)
    print(f"[-1, 2.5] in 3 bits: scale {scale}, zero point {zero}")
    x = torch.tensor([-1.0, -0.3, 0.0, 0.26, 1.2, 2.5, 3.1])
    q = quantize(x, scale, zero, 3)
    back = dequantize(q, scale, zero)
    print("    x   q   back   error")
    for row in zip(x, q, back, back - x, strict=True):
        print("{:5.2f}   {}  {:5.1f}   {:5.2f}".format(*(value.item() for value in row)))
    assert q.tolist() == [0, 1, 2, 3, 4, 7, 7] and back[2] == 0
    assert torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 7).equal(back)
    assert quantize(torch.tensor([-9.0]), scale, zero, 3) == 0  # clamped, not wrapped around
    assert parameters(1.0, 3.5, 3) == (0.5, 0) and parameters(-3.5, -1.0, 3) == (0.5, 7)
    zeros = parameters(-0.875, 2.625, 3)[1], parameters(-1.125, 2.375, 3)[1]
    assert zeros == (2, 2)  # 1.75 and 2.25 steps are rounded to the nearest
    ties = quantize(torch.tensor([0.25, 0.75]), 0.5, 1, 3)  # 0.5 and 1.5 steps
    assert ties.tolist() == [1, 3]  # 0 and 2 steps, then the zero point

    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    scale, zero = parameters(x.min().item(), x.max().item(), bits=8)
    q = quantize(x, scale, zero, 8)
    error = dequantize(q, scale, zero) - x
    # the zero point was rounded too, which moves each end of the range by up to half a step
    inside = (q > 0) & (q < 255)
    assert error[inside].abs().max() <= scale / 2 * 1.001 and error.abs().max() <= scale
    print(f"100,000 normal numbers in 8 bits: {x.nbytes:,} bytes become {q.nbytes:,}")
    print(f"largest error inside the range: {error[inside].abs().max() / scale:.3f} steps")

    wide = 2 * x  # some of these are outside the range, on both sides
    torchs = torch.fake_quantize_per_tensor_affine(wide, scale, zero, 0, 255)
    ours = quantize(wide, scale, zero, 8)
    assert (ours == 0).sum() > 9 and (ours == 255).sum() > 9
    differ = (torchs - dequantize(ours, scale, zero)).abs() > scale / 2
    assert differ.float().mean() < 1e-4  # torch multiplies by 1/scale, so ties may differ
    print("equal to torch.fake_quantize_per_tensor_affine (but for ties)")

    again = quantize(dequantize(q, scale, zero), scale, zero, 8)
    assert torch.equal(again, q) and q.unique().numel() > 200
    print("quantized once more with the same scale: the same integers")


if __name__ == "__main__":
    main()
