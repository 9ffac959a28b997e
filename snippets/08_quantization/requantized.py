"""Failure: numbers that are quantized twice have a larger error than numbers quantized once.

The program rounds from fp32 to 8 bits and then to 4 bits. It also rounds 16 times to 8 bits
with different scales. With equal scales, nothing more is lost. With very different scales, the
errors add up. If each scale is a little larger than the one before, the numbers grow each time.
"""

import torch


def quantize_clipped(x: torch.Tensor, clip: float, bits: int) -> torch.Tensor:
    """Round symmetrically within [-clip, clip], and return floats."""
    largest = 2 ** (bits - 1) - 1
    step = clip / largest
    return (x / step).round().clamp(-largest, largest) * step


def rms(error: torch.Tensor) -> float:
    return error.square().mean().sqrt().item()


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2**18, generator=generator, dtype=torch.float64) * 2 - 1
    assert quantize_clipped(torch.tensor([-9.0, 9.0]), 7.0, 4).tolist() == [-7, 7]
    # --8<-- [start:twice]
    direct = quantize_clipped(x, 1.0, 4)
    by_eight = quantize_clipped(quantize_clipped(x, 1.0, 8), 1.0, 4)
    # --8<-- [end:twice]
    moved = (direct != by_eight).double().mean().item()
    # 14 borders between the 15 levels, each missed by a quarter of the fine step on average
    predicted = 14 * (1 / 127) / 4 / 2
    print(f"8 bits, then 4: {moved:.2%} of the numbers end elsewhere than directly, "
          f"predicted {predicted:.2%}")  # fmt: skip
    print(f"mean error there {rms((direct - x)[direct != by_eight]):.5f} directly, "
          f"{rms((by_eight - x)[direct != by_eight]):.5f} by 8 bits")  # fmt: skip
    assert abs(moved / predicted - 1) < 0.1
    assert rms(by_eight - x) > rms(direct - x)

    print("16 hops         error / one hop's  if independent  0.1 to 0.2 grew by")
    # --8<-- [start:chain]
    chains = {
        "one scale": [1.2] * 16,
        "scales from 1.1 to 2": [1.1 + 0.9 * (0.618 * hop % 1) for hop in range(16)],
        "each 1% wider": [1.01**hop for hop in range(16)],
    }
    for name, clips in chains.items():
        y = x
        for clip in clips:
            y = quantize_clipped(y, clip, 8)
        independent = sum((clip / 127) ** 2 / 12 for clip in clips) ** 0.5
        # --8<-- [end:chain]
        once = (clips[0] / 127) / 12**0.5
        small = (x.abs() > 0.1) & (x.abs() < 0.2)
        growth = (y[small].abs().mean() / x[small].abs().mean()).item() - 1
        print(
            f"{name:20} {rms(y - x) / once:12.2f}  {independent / once:14.2f}  {growth:18.1%}"
        )
        low, high = {"one scale": (0.24, 0.26), "each 1% wider": (2, 4)}.get(name, (0.7, 1.3))
        assert low < rms(y - x) / independent < high, name
        assert abs(growth) < 0.001 if name == "one scale" else growth > 0.02
        assert name != "each 1% wider" or abs(growth - (1.01**15 - 1)) < 0.005


if __name__ == "__main__":
    main()
