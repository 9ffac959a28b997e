"""Computes how often to save: Young's interval, Daly's, and the exact one, and simulates each.

Failures come at random times, also during a save or a restart. Young (1974) balances the time
for saves against lost work. Daly (2006) solves the full cost to a higher order. The exact
optimum is found by Newton's method. The first table compares the formulas with the three cases
in figures 3 to 5 of Daly's paper. Draws checkpoint_interval.svg.
"""

import itertools
import math
import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt


# --8<-- [start:formulas]
def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Fraction of useful time: the inverse of Daly's cost. All arguments in one unit."""
    attempts = math.expm1((interval + save) / between)
    return interval / between * math.exp(-restart / between) / attempts


def young(save: float, between: float) -> float:
    return math.sqrt(2 * save * between)


def daly(save: float, between: float) -> float:
    if save >= 2 * between:
        return between
    small = save / (2 * between)
    return young(save, between) * (1 + math.sqrt(small) / 3 + small / 9) - save


def exact(save: float, between: float) -> float:
    """Solve x = 1 - exp(-x - save/between) for x = interval/between, by Newton."""
    x = young(save, between) / between
    for _ in range(50):
        decay = math.exp(-x - save / between)
        x -= (x - 1 + decay) / (1 - decay)
    return x * between


# --8<-- [end:formulas]


# --8<-- [start:simulate]
def simulate(
    interval: float, save: float, restart: float, between: float, failures: int = 100_000
) -> dict[str, float]:
    """Fractions of the time by use, over many lives: from one failure to the next."""
    rng = random.Random(1974)
    spent = dict.fromkeys(("useful", "saving", "lost", "restarting"), 0.0)
    for _ in range(failures):
        life = rng.expovariate(1 / between)
        spent["restarting"] += min(restart, life)  # a failure may interrupt a restart
        up = max(life - restart, 0.0)
        saved = up // (interval + save)  # only intervals whose save has ended count
        spent["useful"] += saved * interval
        spent["saving"] += saved * save
        spent["lost"] += up - saved * (interval + save)
    total = sum(spent.values())
    return {name: hours / total for name, hours in spent.items()}


# --8<-- [end:simulate]


def hours_without_saves(work: float, between: float, runs: int = 20_000) -> float:
    """Mean time until `work` hours in a row are free of failures."""
    rng, total = random.Random(7), 0.0
    for _ in range(runs):
        while (life := rng.expovariate(1 / between)) < work:
            total += life
        total += work
    return total / runs


def draw(save: float, restart: float) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "interval", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    colours = ("#0b6e99", "#7c3aed", "#c2410c")
    for between, name, colour in zip(
        (1440, 360, 60), ("24 h", "6 h", "1 h"), colours, strict=True
    ):
        minutes = [2 * 1.06**k for k in range(95)]
        curve = [goodput(m, save, restart, between) for m in minutes]
        axes.plot(minutes, curve, color=colour, linewidth=2)
        for m, formula in zip(minutes[4::10], curve[4::10], strict=True):
            seen = simulate(m, save, restart, between, failures=5_000)["useful"]
            assert 0 < abs(seen - formula) < 0.03, "a point must come from the simulation"
            axes.plot(m, seen, "o", color=colour, markersize=5)
        best = young(save, between)
        axes.plot(best, goodput(best, save, restart, between), "^", color="#71717a", ms=11)
        axes.text(
            best,
            goodput(best, save, restart, between) + (-0.13 if between == 360 else 0.045),
            f"a failure every {name}",
            color=colour,
            ha="center",
        )
    axes.text(2.1, 0.02, "▲ Young's interval   ● simulated", color="#71717a")
    axes.set(xscale="log", ylim=(0, 1.05), xlabel="minutes of work between saves")
    axes.set_xticks([2, 5, 10, 20, 50, 100, 200, 500], [2, 5, 10, 20, 50, 100, 200, 500])
    axes.minorticks_off()
    axes.set_ylabel("goodput, fraction of the time")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("checkpoint_interval.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    save, restart = 5.0, 10.0  # minutes, as in the paper
    print("save 5 min, restart 10 min; best interval (min); goodput by formula, simulated")
    print("failure every   Daly's paper    Young             Daly              exact")
    for between, name, printed in ((1440, "24 h", 117), (360, "6 h", 57), (15, "15 min", 9.1)):
        cells, intervals = [], [rule(save, between) for rule in (young, daly, exact)]
        for interval in intervals:
            formula = goodput(interval, save, restart, between)
            seen = simulate(interval, save, restart, between)["useful"]
            assert 0 < abs(formula - seen) < 0.004, "the formula and the simulation differ"
            cells.append(f"{interval:5.1f} {formula:.1%} {seen:.1%}")
        assert float(f"{intervals[1]:.{1 if printed < 10 else 0}f}") == printed
        for pause, factor in itertools.product((0, restart), (0.999, 1.001)):
            nearby = goodput(factor * intervals[2], save, pause, between)
            assert nearby < goodput(intervals[2], save, pause, between), "not the best interval"
        print(f"{name:>13} {printed:>14}   {'   '.join(cells)}")

    assert daly(30.0, 15.0) == daly(99.0, 15.0) == 15  # a save of 2 M or more: save once per M

    between, save, restart = 54 * 24 * 60 / 419, 1.0, 10.0
    best = exact(save, between)
    print(f"\na failure every {between / 60:.2f} h, save 1 min, restart 10 min (assumed):")
    print(
        "interval          useful  saving  lost  restarting   saving + lost, relative to Young:"
    )
    print("                                                     predicted, simulated")
    base = young(save, between)
    at_best = simulate(base, save, restart, between)
    least = (at_best["saving"] + at_best["lost"]) / at_best["useful"]
    for factor in (0.25, 0.5, 1, 2, 4):
        interval = factor * base
        shares = simulate(interval, save, restart, between)
        assert abs(goodput(interval, save, restart, between) - shares["useful"]) < 0.004
        predicted = (factor + 1 / factor) / 2  # save/x + x/2M, relative to its minimum
        seen = (shares["saving"] + shares["lost"]) / shares["useful"] / least
        assert abs(seen / predicted - 1) < 0.12, "the first order is too coarse here"
        cells = "  ".join(f"{share:6.1%}" for share in shares.values())
        print(f"{factor:4} Young {interval:5.1f} min  {cells}   {predicted:.2f}  {seen:.2f}")
    assert goodput(best, save, restart, between) >= goodput(base, save, restart, between)
    alone = between / 60 * math.expm1(24 * 60 / between)
    for hours in (1, 6):
        formula = between / 60 * math.expm1(hours * 60 / between)
        assert abs(hours_without_saves(hours, between / 60) / formula - 1) < 0.04, hours
    print(f"24 h of work without any save: {alone:,.0f} h, {alone / 24:.0f} days, on average")
    draw(5.0, 10.0)


if __name__ == "__main__":
    main()
