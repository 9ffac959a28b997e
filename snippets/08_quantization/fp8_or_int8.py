"""int8 is more accurate for numbers without large outliers, and fp8 for numbers with outliers.

One scale per tensor maps the largest magnitude to the largest number of the format. All steps
of an integer format are equal, and the steps of a float format are proportional to the value.
Compare the columns from top to bottom: the tails become longer. Draws fp8_or_int8.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

COLOURS = {"int8": "#0b6e99", "e4m3": "#c2410c", "e5m2": "#15803d"}


# --8<-- [start:formats]
def int8(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().max() / 127
    return (x / step).round() * step


def float8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype).to(x.dtype) * scale


FORMATS = {
    "int8": int8,
    "e4m3": lambda x: float8(x, torch.float8_e4m3fn),
    "e5m2": lambda x: float8(x, torch.float8_e5m2),
}
# --8<-- [end:formats]


def decibels(x: torch.Tensor, back: torch.Tensor) -> float:
    return 10 * math.log10((x.square().sum() / (back - x).square().sum()).item())


def draw(peaks: list[float], curves: dict[str, list[float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "fp8_or_int8", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.8))
    for name, colour in COLOURS.items():
        axes.plot(peaks, curves[name], "o-", color=colour, markersize=4)
    axes.text(4.5, 44, "int8", color=COLOURS["int8"])
    axes.text(1100, 33.5, "fp8 E4M3", color=COLOURS["e4m3"], ha="right")
    axes.text(1100, 22, "fp8 E5M2", color=COLOURS["e5m2"], ha="right")
    axes.set(xscale="log", xlabel="largest value, in standard deviations of the others")
    axes.set(ylabel="signal to noise\nof the others (dB)", ylim=(-5, 50))
    axes.set_xticks([4, 10, 100, 1000], ["4", "10", "100", "1,000"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("fp8_or_int8.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(2**17, generator=generator)
    laplace = torch.empty(2**17).exponential_(generator=generator)
    laplace *= torch.randn(2**17, generator=generator).sign()
    tail = normal / torch.rand(2**17, generator=generator).clamp(min=1e-3).sqrt()
    table = {
        "uniform": torch.rand(2**17, generator=generator) * 2 - 1,
        "normal": normal,
        "Laplace": laplace,
        "normal / √uniform": tail,
    }
    assert all(abs(x.mean()) < 0.02 * x.std() for x in table.values())  # signs are for nothing
    assert all(cast(table["uniform"]).unique().numel() < 2**8 for cast in FORMATS.values())
    print("signal to noise     largest / rms    int8    E4M3    E5M2")
    ratios = {}
    for name, x in table.items():
        ratios[name] = [decibels(x, cast(x)) for cast in FORMATS.values()]
        peak = (x.abs().max() / x.square().mean().sqrt()).item()
        print(f"{name:18}  {peak:13.1f}  " + "".join(f"{r:5.1f} dB" for r in ratios[name]))
    # a float's mean square error is 4^-m·ln 2/18 of the value's, as chapter 05 derives
    for column, m, dtype in ((1, 3, "E4M3"), (2, 2, "E5M2")):
        predicted = -10 * math.log10(4.0**-m * math.log(2) / 18)
        print(f"predicted for {dtype}: {predicted:.1f} dB")
        assert all(abs(row[column] - predicted) < 1.2 for row in ratios.values())
    assert ratios["normal"][0] > ratios["normal"][1] + 5
    assert abs(ratios["normal"][1] - ratios["Laplace"][1]) < 1

    # one value grows, and takes the scale with it
    peaks = [4.5 * 2**i for i in range(9)]
    curves: dict[str, list[float]] = {name: [] for name in FORMATS}
    for peak in peaks:
        x = normal.clamp(-4.4, 4.4).clone()
        x[0] = peak
        for name, cast in FORMATS.items():
            back = cast(x)
            assert math.isclose(back[0], peak, rel_tol=1e-5)  # the scale fits the outlier
            curves[name].append(decibels(x[1:], back[1:]))
    ahead = [p for p, i, f in zip(peaks, *list(curves.values())[:2], strict=True) if i > f]
    # int8 with a step of peak/127: 20·log10(127/peak) + 10·log10(12) dB
    border = 127 * 10 ** ((10 * math.log10(12) - curves["e4m3"][0]) / 20)
    print(
        f"with one outlier int8 is ahead up to {ahead[-1]:.0f} standard deviations, "
        f"E4M3 from {2 * ahead[-1]:.0f} on; predicted border {border:.0f}"
    )
    assert ahead == peaks[: len(ahead)] and ahead[-1] < border < 2 * ahead[-1]
    assert curves["e4m3"][-1] > 25 and curves["int8"][-1] < 5 < curves["int8"][4]
    draw(peaks, curves)


if __name__ == "__main__":
    main()
