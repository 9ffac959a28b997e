"""Computes the mean time of the slowest of N ranks by a formula and by random draws.

A rank is late in one of three ways: a little normal noise, a delay with an exponential tail, or
a rare long pause. The unit of time is a step without noise. Draws stragglers.svg.
"""

import math
import statistics

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

SIGMA = 0.02  # normal: standard deviation of a rank's step
DELAY = 0.01  # exponential: mean delay
PAUSE, CHANCE = 0.5, 1e-4  # a pause of half a step, once in 10,000 steps of a rank
SIZES = (10, 1_000, 100_000)


# --8<-- [start:predict]
def normal_max(n: int) -> float:
    """E[max] of n: the integral of 1 - Phi(x)^n for x > 0, minus that of Phi(x)^n for x < 0."""
    bell, width = statistics.NormalDist(), 0.002
    points = [width * (k + 0.5) for k in range(-4000, 4000)]
    return 1 + SIGMA * width * sum((x > 0) - bell.cdf(x) ** n for x in points)


def exponential_max(n: int) -> float:
    """The gaps between n exponentials, sorted, have means 1/n, 1/(n-1), ... 1: their sum."""
    return 1 + DELAY * sum(1 / k for k in range(1, n + 1))


def pause_max(n: int) -> float:
    """The step is late if at least one of the n ranks pauses."""
    return 1 + PAUSE * -math.expm1(n * math.log1p(-CHANCE))


# --8<-- [end:predict]


# --8<-- [start:draw]
def steps(name: str, n: int, count: int) -> torch.Tensor:
    """Times of `count` steps: for each step, draw n ranks and take the slowest."""
    slowest = []
    for _ in range(count):
        if name == "normal":
            ranks = 1 + SIGMA * torch.randn(n)
        elif name == "exponential":
            ranks = 1 + DELAY * torch.empty(n).exponential_()
        else:
            ranks = 1 + PAUSE * (torch.rand(n) < CHANCE)
        slowest.append(ranks.max())
    return torch.stack(slowest)


# --8<-- [end:draw]

PREDICT = {"normal": normal_max, "exponential": exponential_max, "pause": pause_max}


def draw(simulated: dict) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "stragglers", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    sizes = sorted({round(2 ** (k / 2)) for k in range(41)} | set(SIZES))
    words = {
        "normal": (1e6, 1.045, "noise of 2% on every rank"),
        "exponential": (200, 1.1, "delay of 1%, exponential"),
        "pause": (4000, 1.4, "a pause of half a step\nin 1 of 10,000"),
    }
    for (name, predict), colour in zip(
        PREDICT.items(), ("#0b6e99", "#7c3aed", "#c2410c"), strict=True
    ):
        curve = [predict(n) for n in sizes]
        assert all(abs(curve[sizes.index(n)] - simulated[name, n]) < 0.003 for n in SIZES)
        axes.plot(sizes, curve, color=colour, linewidth=2)
        axes.plot(SIZES, [simulated[name, n] for n in SIZES], "o", color=colour)
        x, y, text = words[name]
        axes.text(x, y, text, color=colour, ha="right")
    axes.set(xscale="log", xlim=(1, 1.2e6), xlabel="ranks that wait for each other")
    axes.set_ylabel("time of a step, in steps\nwithout noise")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("stragglers.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    simulated = {}
    print("slowest of N, predicted and simulated")
    for name, predict in PREDICT.items():
        cells = []
        for n in SIZES:
            count = {10: 4000, 1_000: 2000, 100_000: 60}[n]
            drawn = steps(name, n, count)
            seen, error = drawn.mean().item(), drawn.std().item() / math.sqrt(count)
            assert abs(seen - predict(n)) < 5 * error + 1e-3, (name, n)
            simulated[name, n] = seen
            cells.append(f"{n:,}: {predict(n):.3f} ≈{seen:.3f}")
        print(f"{name:11}  " + "   ".join(cells))

    rough = 1 + SIGMA * math.sqrt(2 * math.log(100_000))
    print(f"rule 1 + σ·sqrt(2 ln N) at 100,000: {rough:.3f}")
    n, steps_between = 1_000, 16  # wait only every 16 steps: the noise averages out
    total = torch.stack(
        [(1 + SIGMA * torch.randn(steps_between, n)).sum(0).max() for _ in range(400)]
    )
    seen = total.mean().item() / steps_between - 1
    ratio = (normal_max(n) - 1) / seen
    print(f"1,000 ranks that wait only every 16 steps: normal noise costs ≈{seen:.1%}")
    print(f"instead of {normal_max(n) - 1:.1%}, ≈{ratio:.1f} times less (sqrt 16 = 4)")
    assert 3.9 < ratio < 4.1
    assert exponential_max(1) == 1 + DELAY and math.isclose(pause_max(1), 1 + PAUSE * CHANCE)
    # closed forms of the mean of the largest of one, two and three normal numbers
    for few, mean in ((1, 0), (2, 1 / math.sqrt(math.pi)), (3, 1.5 / math.sqrt(math.pi))):
        assert math.isclose(normal_max(few), 1 + SIGMA * mean)

    print("1 of 10,000 GPUs runs at 80% of its clock:")
    for n in SIZES:
        chance = -math.expm1(n * math.log1p(-1e-4))
        print(f"  {n:7,} GPUs: {chance:6.1%} of jobs contain one and take 1.25 times as long")
    draw(simulated)


if __name__ == "__main__":
    main()
