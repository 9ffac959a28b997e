"""Failure: a static range from the wrong data. Values beyond it are clamped, without an error.

A layer is calibrated on small inputs and then receives large ones. The fix has two parts:
calibrate on data like the data in use, and count the values that are clamped.
"""

import math

import torch


# --8<-- [start:static]
class StaticInput:
    """Rounds to int8 within a fixed range, and counts the values outside."""

    def __init__(self, calibration: torch.Tensor) -> None:
        self.step = calibration.abs().max() / 127
        self.outside = self.total = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q = (x / self.step).round()
        self.outside += (q.abs() > 127).sum().item()
        self.total += q.numel()
        return q.clamp(-127, 127) * self.step

    @property
    def clamped(self) -> float:
        """The fraction of all values so far that were outside the range."""
        return self.outside / self.total


# --8<-- [end:static]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 64, generator=generator) / 16
    small = torch.randn(512, 256, generator=generator)
    large = torch.randn(512, 256, generator=generator) * 6
    errors = {}
    for name, calibration in (
        ("calibrated on small inputs", small),
        ("calibrated on both", torch.cat([small, large])),
    ):
        print(name)
        for size, x in (("small", small), ("large", large)):
            static = StaticInput(calibration)
            exact = x @ weight
            ours = torch.cat([static(batch) @ weight for batch in x.chunk(2)])
            errors[name, size] = error = ((ours - exact).norm() / exact.norm()).item()
            norm = (ours.norm() / exact.norm()).item()
            print(f"  {size} inputs: error {error:6.2%}, output {norm:.2f} of its size, "
                  f"clamped {static.clamped:.1%}")  # fmt: skip
            # the probability that a normal number with standard deviation 6 exceeds the range
            beyond = math.erfc(calibration.abs().max().item() / 6 / math.sqrt(2))
            expected = beyond if (calibration is small and x is large) else 0.0
            assert abs(static.clamped - expected) < 0.01
    wrong, right = "calibrated on small inputs", "calibrated on both"
    assert errors[wrong, "large"] > 0.4 and errors[wrong, "small"] < 0.02
    # the fix has a cost: a range six times as wide makes the steps for small inputs larger
    assert errors[right, "large"] < 0.02
    assert 5 < errors[right, "small"] / errors[wrong, "small"] < 7


if __name__ == "__main__":
    main()
