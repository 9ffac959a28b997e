"""Tests Young's interval for failures that come in bursts, and for failures caused by wear.

The times between failures are drawn from Weibull distributions with the same mean, 3.09 h.
Shape 1 means that failures come independently. With a smaller shape, the next failure is more
likely soon after a failure, as with a bad node that is put back. A larger shape means wear.
"""

import math
import random

BETWEEN, SAVE, RESTART = 54 * 24 * 60 / 419, 1.0, 10.0  # minutes


# --8<-- [start:simulate]
def simulate(interval: float, shape: float, failures: int = 30_000) -> float:
    """Goodput with Weibull(shape) times between failures."""
    rng, useful, total = random.Random(7), 0.0, 0.0
    scale = BETWEEN / math.gamma(1 + 1 / shape)
    for _ in range(failures):
        life = rng.weibullvariate(scale, shape)
        total += life
        useful += max(life - RESTART, 0) // (interval + SAVE) * interval
    return useful / total


# --8<-- [end:simulate]


def main() -> None:
    young = math.sqrt(2 * SAVE * BETWEEN)
    attempts = math.expm1((young + SAVE) / BETWEEN)
    formula = young / BETWEEN * math.exp(-RESTART / BETWEEN) / attempts
    print(f"Young's interval {young:.1f} min; goodput by the formula {formula:.1%}")
    tried = [young * 1.25**k for k in range(-5, 6)]
    for shape, word in (
        (0.5, "bursts"), (0.7, "small bursts"), (1.0, "independent"), (3.0, "wear"),
    ):  # fmt: skip
        seen = simulate(young, shape)
        goodputs = [simulate(interval, shape, 8_000) for interval in tried]
        interval = tried[goodputs.index(max(goodputs))]
        at_best = simulate(interval, shape)
        print(
            f"  {word:12} goodput {seen:.1%}; best of {len(tried)} intervals "
            f"{interval:4.1f} min, {at_best:.1%}"
        )
        assert formula - 0.01 < seen < formula + 0.04
        assert (seen > formula + 0.004) == (shape < 1)  # bursts waste less, not more
        # the shortest interval is a third of Young's, the longest is three times as long
        assert math.isclose(tried[0] * tried[-1], young**2) and tried[-1] > 3 * young
        assert max(goodputs[0], goodputs[-1]) < at_best - 0.01  # both are clearly worse
        assert at_best - seen < 0.01, "Young's interval is not good enough here"


if __name__ == "__main__":
    main()
