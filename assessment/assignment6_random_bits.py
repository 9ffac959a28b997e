"""Assignment 6: random numbers without a state, and a layer in int8.

    python assessment/assignment6_random_bits.py

A GPU draws its random numbers by a function of (seed, position), so each thread is independent
of all others. From that come a dropout that stores no mask, and rounding that is right on the
average. Then a linear layer in int8: scales for rows, sums in int32, and rounding by the same
generator where nearest would lose small updates.
"""

import sys

import torch
from torch import nn

MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def multiply(m: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of m·x, for words of 32 bits held in int64."""
    low, high = m * (x & 0xFFFF), m * (x >> 16)
    high = high + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Compute Philox4x32-10 of counters [..., 4], words in int64, and a key of two words.

    The result has the shape of the counters, which stay as they are.
    """
    a, b, c, d = counter.unbind(-1)
    k0, k1 = key
    # >>> solution 1: ten rounds: hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0; WEYL is added to the key
    # hint: hi0, lo0 come from a and MULTIPLIERS[0], hi1, lo1 from c; keys stay 32 bits
    for _ in range(10):
        hi0, lo0 = multiply(MULTIPLIERS[0], a)
        hi1, lo1 = multiply(MULTIPLIERS[1], c)
        a, b, c, d = hi1 ^ b ^ k0, lo1, hi0 ^ d ^ k1, lo0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    # <<< solution
    return torch.stack([a, b, c, d], -1)


def uniform(seed: int, offset: int, first: int, n: int) -> torch.Tensor:
    """Return n fp32 numbers in [0, 1), for the elements from `first` on of a tensor.

    The element i gets the word i % 4 of the counter (i // 4, offset). i // 4 and the offset
    have 64 bits each, which are two words, the low word first. The key is the seed, in the
    same form. The 24 high bits of a word, as an integer divided by 2^24, are the number.
    """
    # >>> solution 2: make the counters that these elements need, call philox, cut, scale
    quarters = torch.arange(first // 4, (first + n + 3) // 4)
    zero = torch.zeros_like(quarters)
    counter = [quarters & MASK, quarters >> 32, zero + (offset & MASK), zero + (offset >> 32)]
    words = philox(torch.stack(counter, -1), (seed & MASK, seed >> 32)).flatten()
    begin = first - first // 4 * 4
    return (words[begin : begin + n] >> 8).float() / 2**24
    # <<< solution


class Dropout(torch.autograd.Function):
    """Dropout with probability p. `first` is the place of x in the whole tensor.

    An element is kept if its uniform number is p or larger. Only a few numbers are stored for
    backward, which draws the mask again.
    """

    @staticmethod
    def forward(ctx, x, p: float, seed: int, offset: int, first: int = 0):
        # >>> solution 3: keep some elements, scale them, remember what draws the mask
        ctx.drawn_by = p, seed, offset, first
        kept = uniform(seed, offset, first, x.numel()).view_as(x) >= p
        return x * kept / (1 - p)
        # <<< solution

    @staticmethod
    def backward(ctx, grad):
        # >>> solution 3: the same mask, the same scale
        p, seed, offset, first = ctx.drawn_by
        kept = uniform(seed, offset, first, grad.numel()).view_as(grad) >= p
        return grad * kept / (1 - p), None, None, None, None
        # <<< solution


def round_by_chance(x: torch.Tensor, seed: int, offset: int) -> torch.Tensor:
    """Round x at random, up with the probability of its fraction, so that the mean is x.

    The result has the shape and the dtype of x. Integers stay as they are.
    """
    # >>> solution 4: compare a uniform number of each element with the fraction
    low = x.floor()  # floor(x + u) would do, were the sum not rounded to fp32
    return low + (uniform(seed, offset, 0, x.numel()).view_as(x) < x - low)
    # <<< solution


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, k] -> int8 and a scale [rows, 1]: symmetric, the largest of a row becomes ±127.

    A row of zeros has the scale 1.
    """
    # >>> solution 5: scale from the row's largest absolute value, round, clamp
    scale = x.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    return (x / scale).round().clamp(-127, 127).to(torch.int8), scale
    # <<< solution


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 by output channel; inputs are quantized by row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", weight)  # [out, in]
        self.register_buffer("scale", scale)  # [out, 1]
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, in] -> [b, out]: int8 products, int32 sums, the scales, the bias."""
        # >>> solution 5: quantize x, multiply as integers, scale rows and columns, add the bias
        rows, row_scale = quantize_rows(x)
        sums = rows.int() @ self.weight.int().t()
        out = sums.float() * row_scale * self.scale.t()
        return out if self.bias is None else out + self.bias
        # <<< solution


# --8<-- [start:main]
def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    words = " ".join(f"{word:08x}" for word in philox(zeros, (0, 0))[0].tolist())
    assert words == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"  # Random123, kat_vectors
    print("philox of zeros:", words)

    x = torch.randn(6, 1000, requires_grad=True)
    y = Dropout.apply(x, 0.1, 7, 3)
    y.sum().backward()
    parts = [Dropout.apply(part, 0.1, 7, 3, 2000 * i) for i, part in enumerate(x.split(2))]
    assert torch.equal(torch.cat(parts), y) and torch.equal(x.grad != 0, y != 0)
    print(f"dropout: {(y == 0).float().mean():.3f} are zero, on one rank or on three alike")

    weight = torch.full((1000,), 100.0)  # in units of the last bit; an update is a tenth of it
    near, chance = weight.clone(), weight.clone()
    for step in range(50):
        near, chance = (near + 0.1).round(), round_by_chance(chance + 0.1, 7, step)
    moved = chance.mean() - 100
    print(f"50 updates of 0.1: nearest {near.mean() - 100:g}, by chance ≈{moved:.1f}")
    assert near.mean() == 100 and abs(chance.mean() - 105) < 0.5

    linear, x = nn.Linear(256, 64), torch.randn(32, 256)
    error = (Int8Linear(linear)(x) - linear(x)).norm() / linear(x).norm()
    assert error < 0.02
    print(f"int8 layer: relative error ≈{error.item():.1%}")


# --8<-- [end:main]


def stop_at_blank(kind, error, trace) -> None:
    if kind is not NotImplementedError:
        return sys.__excepthook__(kind, error, trace)
    sys.exit(f"a blank: {error}")


if __name__ == "__main__":
    sys.excepthook = stop_at_blank
    main()
