"""Computes the goodput on 10 to 100,000 GPUs for four ways to save and restart.

The failure rate per GPU is the rate of the Llama 3 run. The times to save and to restart are
assumed. Each size uses its best interval. Draws goodput_at_scale.svg.
"""

import math
import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PER_GPU = 54 * 24 * 3600 * 16_384 / 419  # seconds between failures of one GPU
WAYS = {  # seconds per save (training waits), seconds from a failure to the next step
    "training waits for the file system": (60, 900),
    "saved in the background": (5, 900),
    "and restarted by a program": (5, 180),
    "copies in neighbours' memory": (1, 45),
}


# --8<-- [start:best]
def best_interval(save: float, between: float) -> float:
    """The exact optimum: x = 1 - exp(-x - save/between), x = interval/between."""
    x = min(math.sqrt(2 * save / between), 1.0)
    for _ in range(50):
        decay = math.exp(-x - save / between)
        x -= (x - 1 + decay) / (1 - decay)
    return x * between


def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Fraction of useful time: the inverse of Daly's cost. All arguments in one unit."""
    attempts = math.expm1((interval + save) / between)
    return interval / between * math.exp(-restart / between) / attempts


def best_goodput(save: float, restart: float, gpus: float) -> float:
    between = PER_GPU / gpus
    return goodput(best_interval(save, between), save, restart, between)


# --8<-- [end:best]


def simulate(save: float, restart: float, gpus: int, failures: int = 40_000) -> float:
    rng, between, useful, total = random.Random(gpus), PER_GPU / gpus, 0.0, 0.0
    interval = best_interval(save, between)
    for _ in range(failures):
        life = rng.expovariate(1 / between)
        total += life
        useful += max(life - restart, 0) // (interval + save) * interval
    return useful / total


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "goodput", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4.4))
    sizes = [10 * 10 ** (k / 12) for k in range(61)]
    colours = ("#c2410c", "#a16207", "#7c3aed", "#0b6e99")
    for (name, (save, restart)), colour in zip(WAYS.items(), colours, strict=True):
        axes.plot(
            sizes,
            [best_goodput(save, restart, n) for n in sizes],
            color=colour,
            lw=2,
            label=f"{name}: {save} s, {restart / 60:g} min",
        )
        for n in (10, 100, 1_000, 10_000, 100_000):
            axes.plot(n, simulate(save, restart, n, 5_000), "o", color=colour, markersize=5)
    axes.plot(16_384, 0.9, "*", color="#71717a", markersize=15)
    axes.text(16_384, 1.04, "★ Llama 3: above 90%", color="#71717a", ha="center")
    axes.set(xscale="log", ylim=(0, 1.12), xlabel="GPUs in one job")
    axes.set_ylabel("goodput, fraction of the time")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", fontsize=11, labelcolor="linecolor")
    figure.tight_layout()
    figure.savefig("goodput_at_scale.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    sizes = (10, 1_000, 16_384, 100_000)
    print("save every … min, goodput by formula and simulated")
    print("save, restart" + "".join(f"{n:>15,} GPUs" for n in sizes))
    for name, (save, restart) in WAYS.items():
        cells = []
        for n in sizes:
            formula, seen = best_goodput(save, restart, n), simulate(save, restart, n)
            assert abs(formula - seen) < 0.006, (name, n)
            every = best_interval(save, PER_GPU / n) / 60
            cells.append(f"{every:6.1f} {formula:6.1%} {seen:6.1%}")
        print(f"{save:2} s, {restart / 60:4g} min" + "".join(cells))

    print("restarts of 15 min cost as much time as saves and lost work together")
    for save in (60, 5):
        n = 2 * save * PER_GPU / 900**2
        kept = best_goodput(save, 0, n)
        assert abs((1 - kept) / -math.expm1(-900 * n / PER_GPU) - 1) < 0.05
        print(f"  on {n:6,.0f} GPUs if a save takes {save} s: {1 - kept:.1%} each")

    between = PER_GPU / 16_384
    print("for a goodput of 90% on 16,384 GPUs, a restart may last, on average,")
    for save in (0, 1, 5, 30, 60):
        if save:
            interval = best_interval(save, between)
            kept = interval / between / math.expm1((interval + save) / between)
        else:
            kept = 1.0
        restart = max(between * math.log(kept / 0.9), 0.0)
        if save:  # does a job with this restart really reach 90%?
            seen = simulate(save, restart, 16_384)
            assert abs(seen - 0.9) < 0.006 if restart else seen < 0.9, save
        print(f"  {restart / 60:4.1f} min if a save stops the training for {save} s")
    state = 405e9 * 14  # bf16 weights, and fp32 weights and two moments
    print(
        f"405B parameters at 14 bytes: {state / 1e12:.2f} TB; at 2 TB/s {state / 2e12:.1f} s,"
    )
    print(f"at 100 GB/s {state / 1e11:.0f} s, at 2 GB/s {state / 2e9 / 60:.0f} min")
    draw()


if __name__ == "__main__":
    main()
