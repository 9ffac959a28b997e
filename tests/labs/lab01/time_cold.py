"""Step 5: no warm-up"""

import statistics
import time

import torch

STEP, HINT = 5, "no_warm_up"


def median_seconds(work, device, repeats=9, warm_up=3):
    def settle():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    times = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter()
        work()
        settle()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
