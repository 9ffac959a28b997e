"""Failure: the grid does not contain 0, so padding is no longer zero.

The border of an image, the padding of a batch and the output of a ReLU contain thousands of
zeros. If 0 has a rounding error, all of them have the same error, so sums of them are biased.
Compare the mean errors inside the image and at its border.
"""

import torch
from torch.nn import functional as F


# --8<-- [start:wrong]
def wrong(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The grid begins at the smallest value, and 0 may be between two points."""
    step = (high - low) / 255
    return ((x - low) / step).round().clamp(0, 255) * step + low


# --8<-- [end:wrong]


# --8<-- [start:right]
def right(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """The range contains 0, and 0 is a point of the grid."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255
    zero = round(-low / step)
    return (((x / step).round() + zero).clamp(0, 255) - zero) * step


# --8<-- [end:right]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    ends = right(torch.tensor([-9.0, 9.0]), -1.0, 3.0)  # clamped to the range
    torch.testing.assert_close(ends, torch.tensor([-1.0, 3.0]), rtol=0, atol=4 / 255 / 2)
    kernel = torch.rand(1, 1, 5, 5, generator=generator, dtype=torch.float64)
    for name, low in (("values from -1 to 3", -1.0), ("values from 2 to 3", 2.0)):
        image = torch.rand(1, 1, 32, 32, generator=generator, dtype=torch.float64)
        image = image * (3 - low) + low
        padded = F.pad(image, (2, 2, 2, 2))
        exact = F.conv2d(padded, kernel)
        border = torch.ones(32, 32, dtype=torch.bool)
        border[2:-2, 2:-2] = False
        print(name)
        for scheme in (wrong, right):
            zero = scheme(torch.zeros(1, dtype=torch.float64), low, 3.0).item()
            error = F.conv2d(scheme(padded, low, 3.0), kernel)[0, 0] - exact[0, 0]
            inner, outer = (error[mask].mean().item() for mask in (~border, border))
            print(f"  {scheme.__name__:5}: 0 becomes {zero:.5f}; mean error of the result "
                  f"inside {inner:+.4f}, at the border {outer:+.4f}")  # fmt: skip
            assert (zero == 0) == (scheme is right)
            assert abs(outer) < 0.005 if scheme is right else outer > 0.01
        if low < 0:  # padding behind the rounding: which integer?
            step, zero = 4 / 255, 64
            q = ((image / step).round() + zero).clamp(0, 255)
            for value in (0, zero):
                result = F.conv2d((F.pad(q, (2, 2, 2, 2), value=value) - zero) * step, kernel)
                outer = (result - exact)[0, 0][border].mean().item()
                print(f"  integers padded with {value:2}: at the border {outer:+.4f}")
                assert (abs(outer) > 0.5) == (value == 0)


if __name__ == "__main__":
    main()
