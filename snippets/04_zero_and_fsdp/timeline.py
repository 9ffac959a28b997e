"""One step of ZeRO-3 on a GPU and a link: hidden above T = P/W, exposed below.

The model has six equal units. Here Ψ is the number of parameters of one unit. The all-gather of
a unit lasts g = 2Ψ/W, and its reduce-scatter in bf16 also lasts g.
Its forward lasts f = 2ΨT/P, and its backward lasts 2f.
When a unit begins to compute, the all-gather of the next unit is issued. When the backward of a
unit has ended, its reduce-scatter is issued. The link works in the order of the calls.

Times are in units of g, so f/g is T divided by P/W. Compare the column `exposed` above and
below the ratio 1. The program also draws timeline.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

UNITS = 6
COLOURS = {
    "forward": "#0b6e99",
    "backward": "#7c3aed",
    "gather": "#c2410c",
    "reduce": "#15803d",
}

Bar = tuple[str, str, int, float, float]  # resource, what, unit, start, end


def step(f: float, g: float = 1.0) -> list[Bar]:
    """Return all operations of a step. One unit is prefetched. The last one stays gathered."""
    bars: list[Bar] = []
    free = {"GPU": 0.0, "link": 0.0}

    def run(resource: str, what: str, unit: int, issued: float, takes: float) -> float:
        begin = max(free[resource], issued)
        free[resource] = begin + takes
        bars.append((resource, what, unit, begin, begin + takes))
        return begin + takes

    arrived = [0.0] * UNITS  # when the parameters of a unit have arrived
    arrived[0] = run("link", "gather", 0, 0.0, g)
    for unit in range(UNITS):
        begins = max(free["GPU"], arrived[unit])
        if unit + 1 < UNITS:
            arrived[unit + 1] = run("link", "gather", unit + 1, begins, g)
        run("GPU", "forward", unit, begins, f)
    for unit in reversed(range(UNITS)):
        begins = max(free["GPU"], arrived[unit])
        if unit > 0:
            arrived[unit - 1] = run("link", "gather", unit - 1, begins, g)
        done = run("GPU", "backward", unit, begins, 2 * f)
        run("link", "reduce", unit, done, g)
    return bars


def draw(cases: dict[str, list[Bar]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "timeline", "font.size": 12}
    figure, rows = plt.subplots(len(cases), 1, figsize=(7, 4.2))
    for axis, (title, bars) in zip(rows, cases.items(), strict=True):
        for resource, what, unit, begin, end in bars:
            y = 1 if resource == "GPU" else 0
            axis.barh(y, end - begin, 0.8, begin, color=COLOURS[what], edgecolor="white")
            if resource == "GPU":
                axis.text(
                    (begin + end) / 2, y, str(unit), ha="center", va="center", color="white"
                )
        axis.set_yticks([0, 1], ["link", "GPU"])
        axis.set_title(title, fontsize=12, loc="right")
        axis.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("time, in gathers of one unit")
    for x, (what, colour) in zip((0, 7, 15, 21), COLOURS.items(), strict=True):
        words = "reduce-scatter" if what == "reduce" else what
        rows[0].text(x, 1.65, words, color=colour)
    figure.tight_layout()
    figure.savefig("timeline.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("T over P/W   step  compute  exposed  fraction of the step that computes")
    cases = {}
    for ratio in (4.0, 2.0, 1.0, 0.5, 0.25):
        bars = step(f=ratio)
        total, compute = max(bar[4] for bar in bars), 3 * ratio * UNITS
        if ratio in (2.0, 0.5):
            cases[f"T = {ratio:g} P/W"] = bars
        print(
            f"{ratio:10.2f}  {total:5.1f}  {compute:7.1f}  {total - compute:7.1f}"
            f"  {100 * compute / total:5.0f}%"
        )
        if ratio >= 1:  # only the first gather and the last reduce-scatter are exposed
            assert total - compute == 2.0
        else:  # the link has 6 + 5 gathers and 6 reduce-scatters, and almost no gap
            assert 17 <= total <= 17 + ratio
    draw(cases)


if __name__ == "__main__":
    main()
