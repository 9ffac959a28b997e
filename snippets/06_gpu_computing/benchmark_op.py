"""Measuring an operator: torch.utils.benchmark, what it does for you, and how far to trust it.

It warms up, counts loops, takes medians, fixes the number of threads, and waits for a GPU. The
same statement measured twice tells how large a difference must be before it means something.
"""

import timeit

import torch
from torch.utils.benchmark import Measurement, Timer

VARIANTS = {
    "(1 - x).clamp(min=0)": "three passes' worth: reads x, writes and reads 1 - x, writes",
    "torch.relu(1 - x)": "the same traffic",
    "torch.rsub(x, 1).clamp_(min=0)": "in place: nothing new is allocated",
}


def measure(statement: str, x: torch.Tensor, threads: int = 1) -> Measurement:
    timer = Timer(statement, globals={"torch": torch, "x": x}, num_threads=threads)
    return timer.blocked_autorange(min_run_time=0.1)


def main() -> None:
    accelerator = torch.accelerator.current_accelerator()
    device = accelerator if accelerator is not None else torch.device("cpu")
    torch.manual_seed(0)
    expected = None
    for n in (1 << 8, 1 << 18):
        x = torch.randn(n, device=device)
        print(f"{n:,} elements")
        for statement in VARIANTS:
            y = eval(statement)  # noqa: S307  the statements above
            expected = (1 - x).clamp(min=0)
            torch.testing.assert_close(y, expected)
            result = measure(statement, x)
            spread = 100 * result.iqr / result.median
            print(f"  {statement:31} ≈{1e6 * result.median:.1f} µs, IQR ≈{spread:.0f} %")
    first, second = (measure("x + 1", x).median for _ in range(2))
    print(f"x + 1 twice: the second is ≈{second / first:.2f} of the first")
    print(
        f"threads: Timer takes {measure('x + 1', x).task_spec.num_threads} unless told otherwise"
    )
    cold = torch.randn(1 << 18, dtype=torch.float64)
    once = timeit.timeit(lambda: torch.linalg.qr(cold[:4096].view(64, 64)), number=1)
    warm = timeit.timeit(lambda: torch.linalg.qr(cold[:4096].view(64, 64)), number=20) / 20
    print(f"torch.linalg.qr, the first call: ≈{once / warm:.0f} times a later one")


if __name__ == "__main__":
    main()
