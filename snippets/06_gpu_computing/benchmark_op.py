"""Measuring an operator: torch.utils.benchmark, what it does for you, and how far to trust it.

It warms up, chooses the number of loops, takes the median, fixes the threads and waits for a
GPU. The same statement measured twice says how large a difference must be to mean one.
"""

import timeit

import torch
from torch.utils.benchmark import Measurement, Timer

VARIANTS = ["(1 - x).clamp(min=0)", "(1 - x).clamp_(min=0)", "torch.relu(1 - x)"]


def measure(statement: str, x: torch.Tensor) -> Measurement:
    timer = Timer(statement, globals={"torch": torch, "x": x})
    return timer.blocked_autorange(min_run_time=0.05)


def main() -> None:
    gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if gpu else torch.device("cpu")
    torch.manual_seed(0)
    for n in (1 << 8, 1 << 14):
        x = torch.randn(n, device=device)
        print(f"{n:,} elements")
        for statement in VARIANTS:
            y = eval(statement)  # first that it is right, then how fast it is
            torch.testing.assert_close(y, torch.where(x < 1, 1 - x, 0))
            result = measure(statement, x)
            assert min(result.times) <= result.median <= max(result.times)
            typical, spread = (f"≈{1e6 * t:.1f} µs" for t in (result.median, result.iqr))
            # the name that the measurement itself bears
            print(f"  {result.task_spec.stmt:21} {typical}, IQR {spread}")
    first, second = (measure("x + 1", x) for _ in range(2))
    ratio = second.median / first.median
    print(f"{second.task_spec.stmt} twice: the second is ≈{ratio:.2f} of the first")
    print(f"threads, if not told: {Timer('pass').timeit(1).task_spec.num_threads}")
    square = torch.randn(64, 64, device=device)
    times = [timeit.timeit(lambda: torch.linalg.qr(square), number=1) for _ in range(20)]
    first, later = (f"≈{1e6 * t:,.0f} µs" for t in (times[0], sorted(times)[10]))
    print(f"torch.linalg.qr: the first call {first}, a later one {later}")


if __name__ == "__main__":
    main()
