"""The best range for normal numbers clips some of them.

A smaller clip reduces the rounding error of all numbers and cuts off the largest ones. The
program integrates the error over the normal density and searches for the best clip. It checks
the integration with the optimal quantizers that Max published in 1960. Compare the best clip
with the column "by balance", which is the formula of the page. Draws best_clip.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

X = torch.linspace(0, 10, 100_001, dtype=torch.float64)  # half the axis, as all is symmetric
DENSITY = torch.exp(-X.square() / 2) * (2 / math.sqrt(2 * math.pi)) * (X[1] - X[0])
DENSITY[0] /= 2  # 0 belongs to both halves
COLOURS = {2: "#52525b", 3: "#7c3aed", 4: "#c2410c", 6: "#15803d", 8: "#0b6e99"}


# --8<-- [start:clip]
def distortion(clip: float, bits: int) -> tuple[float, float]:
    """Mean square error inside and outside [-clip, clip], with 2^bits - 1 levels around 0."""
    largest = 2 ** (bits - 1) - 1
    step = clip / largest
    error = ((X / step).round().clamp(max=largest) * step - X).square() * DENSITY
    return error[clip >= X].sum().item(), error[clip < X].sum().item()


def best(error) -> float:
    """Return the clip with the smallest error, by golden-section search."""
    low, high, ratio = 0.5, 6.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return (low + high) / 2


def balanced(bits: int) -> float:
    """Return the clip at which the derivatives of step²/12 and of the clipping error cancel."""
    largest = 2 ** (bits - 1) - 1
    low, high = 0.1, 8.0
    while high - low > 1e-6:
        c = (low + high) / 2
        tail = math.erfc(c / math.sqrt(2)) / 2
        density = math.exp(-c * c / 2) / math.sqrt(2 * math.pi)
        falls = c / (6 * largest**2) < 4 * (density - c * tail)
        low, high = (c, high) if falls else (low, c)
    return low


# --8<-- [end:clip]


def check_against_max() -> None:
    """2^b levels at half steps: those of Max, Quantizing for Minimum Distortion (1960)."""

    def halves(step: float, bits: int) -> float:
        level = (torch.floor(X / step).clamp(max=2 ** (bits - 1) - 1) + 0.5) * step
        return ((level - X).square() * DENSITY).sum().item()

    for bits, step, published in (
        (2, 0.9957, 0.1188),
        (3, 0.5860, 0.03744),
        (4, 0.3352, 0.01154),
    ):
        assert math.isclose(halves(step, bits), published, rel_tol=1e-3)
        assert halves(step, bits) <= min(halves(step * 0.98, bits), halves(step * 1.02, bits))
    print(
        "2, 3 and 4 bits with levels at half steps: 0.1188, 0.0374, 0.0115, as in Max's table"
    )


def draw(clips: dict[int, float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "best_clip", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.2))
    grid = torch.linspace(0.5, 6, 67).tolist()
    for bits, colour in COLOURS.items():
        totals = [sum(distortion(c, bits)) for c in grid]
        axes.plot(grid, totals, color=colour, linewidth=2)
        axes.plot(clips[bits], sum(distortion(clips[bits], bits)), "o", color=colour)
        axes.text(6.08, totals[-1], f"{bits} bits", color=colour, va="center")
    for part in (0, 1):  # inside the range, outside
        values = [(c, distortion(c, 4)[part]) for c in grid]
        values = [(c, value) for c, value in values if value > 2e-6]
        axes.plot(*zip(*values, strict=True), ":", color=COLOURS[4], linewidth=1.5)
    axes.text(3.9, 3.4e-5, "4 bits: clipping", color=COLOURS[4])
    axes.text(0.95, 5e-4, "4 bits:\nrounding", color=COLOURS[4], va="top")
    axes.set(
        yscale="log", xlabel="clip, in standard deviations", xlim=(0.5, 6.9), ylim=(2e-6, 3)
    )
    axes.set(ylabel="mean square error / variance", xticks=range(1, 7))
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("best_clip.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    check_against_max()
    print("bits   best clip   by balance   outside    error there   error at 4.5   gain")
    clips = {}
    for bits in COLOURS:
        clips[bits] = best(lambda c, bits=bits: sum(distortion(c, bits)))
        least, wide = sum(distortion(clips[bits], bits)), sum(distortion(4.5, bits))
        outside = math.erfc(clips[bits] / math.sqrt(2))
        gain = 10 * math.log10(wide / least)
        print(f"{bits:4}   {clips[bits]:9.2f}   {balanced(bits):10.2f}   {outside:7.3%}   "
              f"{least:11.2e}   {wide:12.2e}   {gain:.1f} dB")  # fmt: skip
        assert least < 0.9 * wide and least <= min(
            sum(distortion(clips[bits] * factor, bits)) for factor in (0.97, 1.03)
        )
        assert abs(balanced(bits) - clips[bits]) < 0.03
    assert list(clips.values()) == sorted(clips.values())
    draw(clips)


if __name__ == "__main__":
    main()
