"""Failure: a static range from the wrong data. Values beyond it are clamped, silently.

A layer is calibrated on quiet inputs and serves loud ones. The fix is twofold: calibrate on
what will come, and count what is clamped.
"""

import torch


# --8<-- [start:static]
class StaticInput:
    """Rounds to int8 within a fixed range, and counts what lies outside."""

    def __init__(self, calibration: torch.Tensor) -> None:
        self.step = calibration.abs().max() / 127
        self.outside = self.seen = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q = (x / self.step).round()
        self.outside += (q.abs() > 127).sum().item()
        self.seen += q.numel()
        return q.clamp(-127, 127) * self.step

    @property
    def share(self) -> float:
        return self.outside / self.seen


# --8<-- [end:static]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 64, generator=generator) / 16
    quiet = torch.randn(512, 256, generator=generator)
    loud = torch.randn(512, 256, generator=generator) * 6
    for name, calibration in (
        ("calibrated on quiet inputs", quiet),
        ("calibrated on both", torch.cat([quiet, loud])),
    ):
        print(name)
        for kind, x in (("quiet", quiet), ("loud", loud)):
            static = StaticInput(calibration)
            exact = x @ weight
            ours = torch.cat([static(batch) @ weight for batch in x.chunk(2)])
            error = ((ours - exact).norm() / exact.norm()).item()
            loudness = (ours.norm() / exact.norm()).item()
            print(f"  {kind:5} inputs: error {error:6.2%}, output {loudness:.2f} of its size, "
                  f"clamped {static.share:.1%}")  # fmt: skip
            if kind == "loud":
                assert (error > 0.2) == (calibration is quiet)
                assert (static.share > 0.2) == (calibration is quiet)


if __name__ == "__main__":
    main()
