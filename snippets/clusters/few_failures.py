"""Computes what it costs to estimate the time between failures from only k failures.

The mean of k gaps has a relative error of 1/sqrt(k). The interval grows with the root of this
mean, and near its minimum the overhead is flat. The error therefore adds only about 1/(8k) to
the overhead.
"""

import math
import random

BETWEEN, SAVE, RESTART = 54 * 24 * 60 / 419, 1.0, 10.0  # minutes


def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Fraction of useful time: the inverse of Daly's cost. All arguments in one unit."""
    attempts = math.expm1((interval + save) / between)
    return interval / between * math.exp(-restart / between) / attempts


# --8<-- [start:guess]
def predict(k: int) -> float:
    """Mean overhead relative to the best: E[(f + 1/f)/2], f the root of the mean of k gaps."""
    root = math.gamma(k + 0.5) / math.gamma(k) / math.sqrt(k)
    inverse = math.gamma(k - 0.5) / math.gamma(k) * math.sqrt(k)
    return (root + inverse) / 2


def simulate(k: int, count: int = 20_000) -> tuple[float, float]:
    """Mean overhead relative to the best, and mean goodput, if k gaps were observed."""
    rng, kept, excess = random.Random(k), 0.0, 0.0
    best = math.sqrt(2 * SAVE * BETWEEN)
    for _ in range(count):
        guess = sum(rng.expovariate(1 / BETWEEN) for _ in range(k)) / k
        interval = math.sqrt(2 * SAVE * guess)
        kept += goodput(interval, SAVE, RESTART, BETWEEN)
        excess += (SAVE / interval + interval / 2 / BETWEEN) / (2 * SAVE / best)
    return excess / count, kept / count


# --8<-- [end:guess]


def main() -> None:
    best = goodput(math.sqrt(2 * SAVE * BETWEEN), SAVE, RESTART, BETWEEN)
    print(f"goodput if the time between failures is known: {best:.1%}")
    print("                        overhead / smallest overhead")
    print("failures seen   error   predicted, simulated, 1 + 1/8k   goodput")
    for k in (1, 3, 10, 30):
        excess, kept = simulate(k)
        assert abs(excess - predict(k)) < (0.1 if k == 1 else 0.01)
        assert best - kept < (0.03 if k == 1 else 0.005)
        print(
            f"{k:13} {1 / math.sqrt(k):7.0%}   {predict(k):9.3f} {excess:10.3f}"
            f" {1 + 1 / (8 * k):9.3f}   {kept:7.1%}"
        )


if __name__ == "__main__":
    main()
