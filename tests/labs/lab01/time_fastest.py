"""Step 5: the fastest call"""

import time

import torch

STEP, HINT = 5, "minimum"


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
        settle()
        times.append(time.perf_counter() - start)
    return min(times)
