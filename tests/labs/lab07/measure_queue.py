"""Step 8: waits only behind the work"""

# ruff: noqa: F821

STEP, HINT = 8, "queued_before"


def measure(work, clock, warm=3, repeats=7):
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        begin = clock()
        work()
        torch.accelerator.synchronize()
        times.append(clock() - begin)
    return statistics.median(times)
