"""Step 8: never waits"""

# ruff: noqa: F821

STEP, HINT = 8, "not_synchronized"


def measure(work, clock, warm=3, repeats=7):
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        begin = clock()
        work()
        times.append(clock() - begin)
    return statistics.median(times)
