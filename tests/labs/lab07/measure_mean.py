"""Step 8: the mean"""

# ruff: noqa: F821

STEP, HINT = 8, "not_median"


def measure(work, clock, warm=3, repeats=7):
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = clock()
        work()
        torch.accelerator.synchronize()
        times.append(clock() - begin)
    return statistics.mean(times)
