"""A time between failures that was estimated from k failures: what the error costs.

The mean of k gaps is off by 1/sqrt(k). The interval follows its root, and near its best the
overhead is flat, so the cost is small: about 1/(8k) of the overhead.
"""

import math
import random

BETWEEN, SAVE, RESTART = 54 * 24 * 60 / 419, 1.0, 10.0  # minutes


def goodput(interval: float, save: float, restart: float, between: float) -> float:
    """Useful share of the time (Daly's cost, inverted). All arguments in the same unit."""
    attempts = math.expm1((interval + save) / between)
    return interval / between * math.exp(-restart / between) / attempts


# --8<-- [start:guess]
def predict(k: int) -> float:
    """E[(f + 1/f)/2], f the root of the mean of k exponentials: how much more overhead."""
    root = math.gamma(k + 0.5) / math.gamma(k) / math.sqrt(k)
    inverse = math.gamma(k - 0.5) / math.gamma(k) * math.sqrt(k)
    return (root + inverse) / 2


def simulate(k: int, count: int = 20_000) -> tuple[float, float]:
    """Overhead as a multiple of the best, and goodput, when k gaps were seen before."""
    dice, kept, excess = random.Random(k), 0.0, 0.0
    best = math.sqrt(2 * SAVE * BETWEEN)
    for _ in range(count):
        guess = sum(dice.expovariate(1 / BETWEEN) for _ in range(k)) / k
        interval = math.sqrt(2 * SAVE * guess)
        kept += goodput(interval, SAVE, RESTART, BETWEEN)
        excess += (SAVE / interval + interval / 2 / BETWEEN) / (2 * SAVE / best)
    return excess / count, kept / count


# --8<-- [end:guess]


def main() -> None:
    best = goodput(math.sqrt(2 * SAVE * BETWEEN), SAVE, RESTART, BETWEEN)
    print(f"useful when the time between failures is known: {best:.1%}")
    print("failures seen   error   overhead, predicted, simulated; 1 + 1/8k   useful")
    for k in (1, 3, 10, 30):
        excess, kept = simulate(k)
        assert abs(excess - predict(k)) < (0.1 if k == 1 else 0.01)
        assert best - kept < (0.03 if k == 1 else 0.005)
        print(
            f"{k:13} {1 / math.sqrt(k):6.0%}   {predict(k):19.3f} {excess:10.3f}"
            f" {1 + 1 / (8 * k):11.3f}   {kept:6.1%}"
        )


if __name__ == "__main__":
    main()
