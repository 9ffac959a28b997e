"""Predicted against measured, layout by layer and model: a figure of the planner's errors.

    python errors.py measured.csv

Draws errors.svg: memory of rank 0, and throughput, on logarithmic axes. A point on the line is
exact; the band is 12% of memory and 30% of throughput.
"""

import math
import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from plan import GIB, SEQUENCE, memory_error, predicted_rows, speed_error, stop

COLOURS = {"1B": "#0072b2", "3B": "#009e73", "8B": "#d55e00", "80B": "#cc79a7"}


def main() -> None:
    if len(sys.argv) != 2:
        stop("errors.py", "give it one file of measured rows, such as measured.csv")
    ran = [row for row in predicted_rows(sys.argv[1]) if row.ran and row.consistent]

    def tokens(row, seconds: float) -> float:
        return 256 * SEQUENCE / seconds / row.layout.gpus

    drawn = {
        "memory of rank 0, GiB": (
            0.12, lambda row: (row.memory, row.planned.first / GIB), memory_error,
        ),
        "tokens a second and GPU": (
            0.3,
            lambda row: (tokens(row, row.seconds), tokens(row, row.predicted.seconds)),
            speed_error,
        ),
    }  # fmt: skip
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "errors", "font.size": 11}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4), layout="constrained")
    for axis, (what, (band, pair, error)) in zip(axes, drawn.items(), strict=True):
        points = [pair(row) for row in ran]
        # the axes show the same numbers as the score
        assert all(
            math.isclose(y / x - 1, error(row), abs_tol=1e-9)
            for (x, y), row in zip(points, ran, strict=True)
        )
        low, high = (f(v for point in points for v in point) for f in (min, max))
        ends = [low / 1.25, high * 1.25]
        axis.fill_between(
            ends, [e * (1 - band) for e in ends], [e * (1 + band) for e in ends],
            color="#888888", alpha=0.25, linewidth=0,
        )  # fmt: skip
        axis.plot(ends, ends, color="#888888", linewidth=1)
        for model, colour in COLOURS.items():
            some = [p for p, row in zip(points, ran, strict=True) if row.model == model]
            axis.scatter(*zip(*some, strict=True), s=22, color=colour, label=model, alpha=0.8)
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=what)
        axis.set(xlabel="measured", ylabel="predicted")
        inside = sum(abs(error(row)) <= band for row in ran)
        print(f"{what}: {inside} of {len(ran)} within {band:.0%}")
    axes[0].legend(frameon=False)
    figure.savefig("errors.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
