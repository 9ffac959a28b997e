"""What does a run cost if machines fail? 6ΨD, MFU, a price, and the best checkpoint interval.

The useful fraction of the time (goodput) depends on the time to save, the time to restart and
the time between failures. A simulation with random failures checks the formula. You can pass
your own price: python run_cost.py --price 2.5. The program draws run_cost.svg.
"""

import argparse
import math
import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


# --8<-- [start:goodput]
def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """The useful fraction of the time. `between` is the mean between failures; all in hours."""
    expected = (between + restart) * math.expm1((interval + save) / between)
    return interval / expected


def simulate(
    interval: float, save: float, restart: float, between: float, hours: float
) -> float:
    """Simulate this fraction. A random failure destroys the work since the last checkpoint."""
    generator, clock, kept = random.Random(0), 0.0, 0.0
    failure = generator.expovariate(1 / between)
    while clock < hours:
        if clock + interval + save <= failure:
            clock, kept = clock + interval + save, kept + interval
        else:
            clock = failure + restart
            failure = clock + generator.expovariate(1 / between)
    return kept / clock


# --8<-- [end:goodput]


def draw(rows: list[tuple[str, float, float, float]]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "run_cost", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3))
    names = ["FLOPs of the model at peak rate", "steps slower than peak (MFU)", "failures"]
    left = [0.0] * len(rows)
    for part, name in enumerate(names):
        colour = ["#15803d", "#0b6e99", "#c2410c"][part]
        widths = [row[1 + part] / 1000 for row in rows]
        axes.barh(range(len(rows)), widths, 0.7, left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, total in enumerate(left):
        axes.text(total + 10, row, f"{total:,.0f}", va="center", color="#52525b")
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="thousand GPU-hours", xlim=(0, 1120))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="upper center", ncols=3, fontsize=10, frameon=False, columnspacing=1)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    figure.savefig("run_cost.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--price", type=float, default=2.0, help="of a GPU-hour, in your money")
    price = parser.parse_args().price
    if price <= 0:
        parser.error("the price must be more than 0")

    # 16,384 GPUs, 419 unexpected interruptions in 54 days, as the Llama 3 paper reports
    between = 54 * 24 / 419
    save, restart = 1 / 60, 10 / 60
    print(
        f"a failure every {between:.2f} h; saving {60 * save:.0f} min, restart "
        f"{60 * restart:.0f} min (assumed)"
    )
    best = math.sqrt(2 * save * between)
    print(f"best interval sqrt(2 · save · between) = {60 * best:.0f} min")
    for minutes in (5, round(60 * best), 60, 120):
        arguments = (minutes / 60, save, restart, between)
        formula, found = goodput(*arguments), simulate(*arguments, hours=200_000)
        assert abs(formula - found) < 0.005, "the formula does not describe the simulation"
        words = f"useful {formula:.1%} by formula, {found:.1%} simulated"
        print(f"  every {minutes:3} min: {words}")

    parameters, tokens, gpus, peak = 70e9, 1.5e12, 1024, 989e12
    flops = 6 * parameters * tokens
    print(f"70B parameters, 1.5T tokens: 6ΨD = {flops:.2e} FLOPs, on {gpus} × 989 TFLOP/s:")
    rows, at_peak = [], flops / peak / 3600
    for mfu, useful in ((0.40, 1.0), (0.40, 0.90), (0.30, 0.90), (0.20, 0.90)):
        hours = flops / (peak * mfu * useful) / 3600
        lost = hours * (1 - useful)  # to saving, to restarts, and by work that is done again
        name = f"MFU {mfu:.0%}, useful {useful:.0%}"
        rows.append((name, at_peak, hours - lost - at_peak, lost))
        assert math.isclose((hours - lost) * mfu, at_peak)
        print(
            f"  MFU {mfu:.0%}, useful {useful:.0%}: {hours:,.0f} GPU-hours, "
            f"{hours / gpus / 24:.0f} days, {price * hours / 1e6:.2f} M at {price:.2f} an hour"
        )
    draw(rows)


if __name__ == "__main__":
    main()
