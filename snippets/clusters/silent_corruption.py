"""A fault that nobody sees for hours: how many checkpoints to keep, and which.

A wrong number enters the weights; it is noticed after six hours on average (assumed), and every
checkpoint written in between holds it. Keeping the newest k reaches back k intervals; keeping
the two newest of every 1st, 2nd, 4th, … reaches back 2^k with hardly more files.
"""

import math
import random

INTERVAL, NOTICED = 20 / 60, 6.0  # hours


# --8<-- [start:keep]
def newest(now: int, k: int) -> set[int]:
    """Numbers of the checkpoints on disk after number `now` was written."""
    return set(range(now - k + 1, now + 1))


def ladder(now: int, levels: int) -> set[int]:
    """The two newest multiples of 1, 2, 4, …: one to use, one while the next is awaited."""
    kept = set()
    for step in (2**level for level in range(levels)):
        last = now // step * step
        kept |= {last, last - step}
    return kept


def predict_newest(k: int) -> float:
    """Chance that all are bad: k saves come before the fault is noticed."""
    x = INTERVAL / NOTICED
    return math.exp(-(k - 1) * x) * -math.expm1(-x) / x


def simulate(keep, size: int, count: int = 30_000) -> tuple[float, float, int]:
    """Share of faults with no good checkpoint left, mean hours lost, most files at a time."""
    dice, ruined, lost, files = random.Random(6), 0, 0.0, 0
    for _ in range(count):
        happened = dice.uniform(1000, 2000)  # in intervals; save i ends at time i
        noticed = happened + dice.expovariate(INTERVAL / NOTICED)
        on_disk = keep(math.floor(noticed), size)
        good = [i for i in on_disk if i <= happened]
        ruined += not good
        lost += noticed - max(good) if good else 0
        files = max(files, len(on_disk))
    return ruined / count, lost / max(count - ruined, 1) * INTERVAL, files


# --8<-- [end:keep]


def main() -> None:
    print(
        "kept                        files  all bad: predicted, simulated   hours lost if not"
    )
    for k in (1, 3, 9, 18, 60):
        ruined, lost, files = simulate(newest, k)
        assert abs(ruined - predict_newest(k)) < 0.015
        print(
            f"{f'the newest {k}':27} {files:5}   "
            f"{predict_newest(k):18.1%} {ruined:11.1%} {lost:12.1f}"
        )
    for levels in (4, 8):
        for now in range(1000, 1300):  # what it keeps must still be there: nothing comes back
            assert ladder(now, levels) <= ladder(now - 1, levels) | {now}
        ruined, lost, files = simulate(ladder, levels)
        # at worst it reaches back over 2^(levels - 1) intervals
        bound = math.exp(-(2 ** (levels - 1)) * INTERVAL / NOTICED)
        assert ruined <= bound + 0.01 and files <= levels + 1
        print(
            f"{f'two of every 1, 2, … {2 ** (levels - 1)}':27} {files:5}   "
            f"{f'below {bound:.1%}':>18} {ruined:11.1%} {lost:12.1f}"
        )


if __name__ == "__main__":
    main()
