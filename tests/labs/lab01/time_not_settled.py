"""Step 5: the queueing is timed"""

import statistics
import time

import torch

STEP, HINT = 5, "not_settled"


def median_seconds(work, device, repeats=9, warm_up=3):
    def settle():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    for _ in range(warm_up):
        work()
    times = []
    for _ in range(repeats):
        settle()
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
