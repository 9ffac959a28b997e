"""Step 5: one reading around all calls"""

import time

import torch

STEP, HINT = 5, "mean"


def median_seconds(work, device, repeats=9, warm_up=3):
    def settle():
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    for _ in range(warm_up):
        work()
    settle()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    settle()
    return (time.perf_counter() - start) / repeats
