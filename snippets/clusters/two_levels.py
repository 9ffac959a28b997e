"""Simulates two kinds of checkpoint: often in a neighbour's memory, and rarely on disk.

A copy in the memory of another node takes a second and survives the loss of one node. One
failure in twenty (assumed) destroys both, so only the checkpoint on disk is left. The program
compares a first-order prediction with a simulation, and shows that the two predicted intervals
are better than intervals of a quarter or four times the length.
"""

import math
import random

BETWEEN = 54 * 24 * 3600 * 16_384 / 419  # seconds between failures of one GPU
MEMORY, DISK = 1.0, 60.0  # seconds to save
FROM_MEMORY, FROM_DISK = 60.0, 300.0  # seconds from a failure to the next step
DEEP = 0.05  # fraction of the failures that only the disk survives


# --8<-- [start:predict]
def intervals(between: float) -> tuple[float, float]:
    """Young's interval of each level, for the failures from which this level recovers."""
    return (
        math.sqrt(2 * MEMORY * between / (1 - DEEP)),
        math.sqrt(2 * DISK * between / DEEP),
    )


def predict(short: float, long: float, between: float) -> float:
    """Goodput to first order, from the cost of saves, lost work and restarts."""
    saving = MEMORY / short + DISK / long
    lost = ((1 - DEEP) * short + DEEP * long) / 2 / between
    restarting = ((1 - DEEP) * FROM_MEMORY + DEEP * FROM_DISK) / between
    return (1 - restarting) / (1 + saving + lost)


# --8<-- [end:predict]


# --8<-- [start:simulate]
def simulate(short: float, long: float, between: float, failures: int) -> float:
    """Goodput of a job that loses all work since the checkpoint from which it recovers."""
    rng, clock, disk, memory = random.Random(0), 0.0, 0.0, 0.0  # work saved at each level
    per_disk = max(round(long / short), 1)  # one save in `per_disk` is also written to disk
    since = 0  # saves since the last one on disk
    for _ in range(failures):
        fails = clock + rng.expovariate(1 / between)
        while True:
            to_disk = since + 1 == per_disk
            ends = clock + short + MEMORY + (DISK if to_disk else 0)
            if ends > fails:
                break
            clock, memory, since = ends, memory + short, since + 1
            if to_disk:
                disk, since = memory, 0
        if rng.random() < DEEP:
            memory, since, clock = disk, 0, fails + FROM_DISK
        else:
            clock = fails + FROM_MEMORY
    return memory / clock


# --8<-- [end:simulate]


def main() -> None:
    print("          interval of saves to        goodput with both levels:       goodput with")
    print("   GPUs      memory,       disk       predicted, simulated            disk alone")
    for n in (1_000, 16_384, 100_000):
        between = BETWEEN / n
        short, long = intervals(between)
        predicted, seen = predict(short, long, between), simulate(short, long, between, 6_000)
        assert abs(predicted - seen) < (0.01 if n < 100_000 else 0.03), n
        for factor in (0.25, 4):
            for other in ((short * factor, long), (short, long * factor)):
                assert simulate(*other, between, 6_000) < seen, "this pair is not the best"
        alone = math.sqrt(2 * DISK * between)
        attempts = math.expm1((alone + DISK) / between)
        single = alone / (between + FROM_DISK) / attempts
        assert seen > single
        print(
            f"{n:7,}   {short / 60:8.1f} min {long / 60:8.0f} min"
            f"    {predicted:16.1%} {seen:10.1%}    {single:14.1%}"
        )


if __name__ == "__main__":
    main()
