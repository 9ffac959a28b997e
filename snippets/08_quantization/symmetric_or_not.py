"""A zero point gains one bit if all values have the same sign.

Symmetric quantization uses the integers -127 … 127 and the zero point 0. Affine quantization
uses 0 … 255 from the smallest value to the largest value. The program compares the error with
step/√12, the error of uniform noise. Look at the gains in decibels: 6 dB are one bit.
"""

import math

import torch
from torch.nn import functional as F


# --8<-- [start:schemes]
def symmetric(x: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, float]:
    """Return x after a round trip through the integers, and the step."""
    largest = 2 ** (bits - 1) - 1  # -128 stays unused, so that -x is representable as well
    step = x.abs().max().item() / largest
    return (x / step).round().clamp(-largest, largest) * step, step


def affine(x: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, float]:
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    step = (high - low) / (2**bits - 1)
    zero = round(-low / step)
    q = ((x / step).round() + zero).clamp(0, 2**bits - 1)
    return (q - zero) * step, step


# --8<-- [end:schemes]


def decibels(x: torch.Tensor, back: torch.Tensor) -> float:
    """Return the signal-to-noise ratio: power of x over power of the error."""
    return 10 * math.log10((x.square().sum() / (back - x).square().sum()).item())


def main() -> None:
    torch.set_num_threads(1)
    normal = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    print("8 bits            step     error / (step/√12)   signal to noise")
    assert affine(torch.tensor([51.0, 255.0]))[1] == 1  # 255 steps from 0, not from 51
    ratios = {}
    for name, x in {
        "normal": normal,
        "after GELU": F.gelu(normal),
        "after ReLU": F.relu(normal),
        "probabilities": normal.view(-1, 50).softmax(-1),
    }.items():
        for scheme in (symmetric, affine):
            back, step = scheme(x)
            moved = x != 0  # exact zeros have no error, and half of ReLU's output is zero
            error = (back - x)[moved].square().mean().sqrt().item() / (step / math.sqrt(12))
            ratios[name, scheme] = decibels(x, back)
            print(f"{name:14}{scheme.__name__:10}{step:8.5f}   {error:8.2f}   "
                  f"{ratios[name, scheme]:20.1f} dB")  # fmt: skip
            assert 0.85 < error < 1.15, (name, scheme, error)
    gain = {name: ratios[name, affine] - ratios[name, symmetric] for name, _ in ratios}
    print("a zero point gains " + ", ".join(f"{g:.1f} dB ({n})" for n, g in gain.items()))
    assert gain["normal"] < 1 and abs(gain["after ReLU"] - 6.05) < 0.2


if __name__ == "__main__":
    main()
