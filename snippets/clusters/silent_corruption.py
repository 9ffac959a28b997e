"""Computes how many checkpoints to keep, and which, for faults that nobody sees for hours.

A wrong number enters the weights. Somebody notices it after six hours on average (assumed), and
every checkpoint written in between contains it. The newest k checkpoints reach back k
intervals. The two newest multiples of 1, 2, 4, … 128 reach back at least 128, with nine files.
"""

import math
import random

INTERVAL, NOTICED = 20 / 60, 6.0  # hours


# --8<-- [start:keep]
def newest(now: int, k: int) -> set[int]:
    """Numbers of the checkpoints on disk after number `now` was written."""
    return set(range(now - k + 1, now + 1))


def two_of_each_power(now: int, levels: int) -> set[int]:
    """The two newest multiples of 1, 2, 4, …: the older one bridges the time to the next."""
    kept = set()
    for step in (2**level for level in range(levels)):
        last = now // step * step
        kept |= {last, last - step}
    return kept


def predict_newest(k: int) -> float:
    """Chance that all k checkpoints contain the fault: k saves come before it is noticed."""
    x = INTERVAL / NOTICED
    return math.exp(-(k - 1) * x) * -math.expm1(-x) / x


def simulate(keep, size: int, count: int = 30_000) -> tuple[float, float, int]:
    """Fraction of faults without a good checkpoint, mean hours lost, and most files."""
    rng, ruined, lost, files = random.Random(6), 0, 0.0, 0
    for _ in range(count):
        happened = rng.uniform(1000, 2000)  # in intervals; save i ends at time i
        noticed = happened + rng.expovariate(INTERVAL / NOTICED)
        on_disk = keep(math.floor(noticed), size)
        good = [i for i in on_disk if i <= happened]
        ruined += not good
        lost += noticed - max(good) if good else 0
        files = max(files, len(on_disk))
    return ruined / count, lost / max(count - ruined, 1) * INTERVAL, files


# --8<-- [end:keep]


def main() -> None:
    print(
        "checkpoints on disk         files  all bad: predicted, simulated   hours lost if not"
    )
    for k in (1, 3, 9, 18, 60):
        ruined, lost, files = simulate(newest, k)
        assert abs(ruined - predict_newest(k)) < 0.015
        print(
            f"{f'the newest {k}':27} {files:5}   "
            f"{predict_newest(k):18.1%} {ruined:11.1%} {lost:12.1f}"
        )
    for levels in (4, 8):
        for now in range(1000, 1300):  # a deleted file is never wanted again
            assert two_of_each_power(now, levels) <= two_of_each_power(now - 1, levels) | {now}
        ruined, lost, files = simulate(two_of_each_power, levels)
        # the oldest file is at least 2^(levels - 1) intervals old
        bound = math.exp(-(2 ** (levels - 1)) * INTERVAL / NOTICED)
        assert ruined <= bound + 0.01 and files <= levels + 1
        print(
            f"{f'two of every 1, 2, … {2 ** (levels - 1)}':27} {files:5}   "
            f"{f'below {bound:.1%}':>18} {ruined:11.1%} {lost:12.1f}"
        )


if __name__ == "__main__":
    main()
