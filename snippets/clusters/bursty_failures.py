"""Young's interval when failures are not random: bursts after a repair, or wear.

A job's lives are drawn from Weibull distributions with one mean, 3.09 h. Shape 1 is memoryless;
below 1 a failure makes the next more likely soon (a bad node that was put back).
"""

import math
import random

BETWEEN, SAVE, RESTART = 54 * 24 * 60 / 419, 1.0, 10.0  # minutes


# --8<-- [start:simulate]
def simulate(interval: float, shape: float, failures: int = 30_000) -> float:
    dice, useful, total = random.Random(7), 0.0, 0.0
    scale = BETWEEN / math.gamma(1 + 1 / shape)
    for _ in range(failures):
        life = dice.weibullvariate(scale, shape)
        total += life
        useful += max(life - RESTART, 0) // (interval + SAVE) * interval
    return useful / total


# --8<-- [end:simulate]


def main() -> None:
    young = math.sqrt(2 * SAVE * BETWEEN)
    attempts = math.expm1((young + SAVE) / BETWEEN)
    formula = young / BETWEEN * math.exp(-RESTART / BETWEEN) / attempts
    print(f"Young's interval {young:.1f} min; memoryless formula {formula:.1%}")
    for shape, word in ((0.5, "bursts"), (0.7, ""), (1.0, "memoryless"), (3.0, "wear")):
        seen = simulate(young, shape)
        tried = range(-5, 6)
        best = max((simulate(young * 1.25**k, shape, 8_000), k) for k in tried)
        interval = young * 1.25 ** best[1]
        at_best = simulate(interval, shape)
        print(
            f"  shape {shape}: useful {seen:.1%}; best of {len(tried)} intervals "
            f"{interval:4.1f} min, {at_best:.1%}  {word}".rstrip()
        )
        assert formula - 0.01 < seen < formula + 0.04
        assert (seen > formula + 0.004) == (shape < 1)  # bursts waste less, not more
        assert at_best - seen < 0.01, "Young's interval is not good enough here"


if __name__ == "__main__":
    main()
