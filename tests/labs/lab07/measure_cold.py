"""Step 8: no warm-up"""

# ruff: noqa: F821

STEP, HINT = 8, "warm_up_measured"


def measure(work, clock, warm=3, repeats=7):
    times = []
    for _ in range(repeats):
        torch.accelerator.synchronize()
        begin = clock()
        work()
        torch.accelerator.synchronize()
        times.append(clock() - begin)
    return statistics.median(times)
