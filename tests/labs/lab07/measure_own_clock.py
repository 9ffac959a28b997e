"""Step 8: another clock"""

# ruff: noqa: F821

STEP, HINT = 8, "own_clock"


def measure(work, clock, warm=3, repeats=7):
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = time.perf_counter()
        work()
        torch.accelerator.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
