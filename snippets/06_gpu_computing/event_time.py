"""Compare the host's clock with two events: events measure kernels and the gaps between them.

In the model the host needs LAUNCH for each kernel, and the device runs the kernels in order. An
event is reached when the device comes to it. This is enough to predict both clocks for 100
kernels, with and without work before the first event. On a GPU the program also measures them.
Look at the rows in which a kernel is shorter than a launch: there the events show the launches.
"""

import statistics
import time

import torch

LAUNCH, COUNT = 5.0, 100  # µs, an assumption; kernels between two events


# --8<-- [start:model]
def simulate(kernel: float, before: float = 0.0) -> dict[str, float]:
    """Return the µs per kernel of each clock, if `before` µs of work are in the queue."""
    host, device = 0.0, before  # the time at which each is free
    first = device  # the first event is reached after the work before it
    for _ in range(COUNT):
        host += LAUNCH
        device = max(device, host) + kernel
    readings = {"host, no wait": host, "host, waits": device, "events": device - first}
    return {name: time / COUNT for name, time in readings.items()}


# --8<-- [end:model]


# --8<-- [start:measure]
def measure(x: torch.Tensor, work: torch.Tensor | None) -> dict[str, float]:
    """Measure the same on a GPU. Each kernel writes `x`. Products of `work` come first."""
    start, end = (torch.Event(enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    for _ in range(10 if work is not None else 0):
        work @ work
    start.record()
    begin = time.perf_counter()
    for _ in range(COUNT):
        x.add_(1)
    launched = time.perf_counter()
    end.record()
    end.synchronize()
    waited = time.perf_counter()
    times = {"host, no wait": launched - begin, "host, waits": waited - begin}
    shown = {name: 1e6 * t / COUNT for name, t in times.items()}
    return shown | {"events": 1e3 * start.elapsed_time(end) / COUNT}


# --8<-- [end:measure]


def show(title: str, readings: dict[str, float], measured: str = "") -> None:
    cells = "".join(f"{f'{measured}{time:.1f}':>15}" for time in readings.values())
    print(f"{title:32}{cells}")


def main() -> None:
    print(f"µs for each of {COUNT} kernels, {LAUNCH:.0f} µs to launch one")
    print(f"{'kernel':32}" + "".join(f"{name:>15}" for name in simulate(1)))
    for kernel in (1.0, 4.0, 20.0):
        readings = simulate(kernel)
        show(f"{kernel:.0f} µs", readings)
        ends = LAUNCH + COUNT * kernel if kernel > LAUNCH else COUNT * LAUNCH + kernel
        expected = {
            "host, no wait": LAUNCH,
            "host, waits": ends / COUNT,
            "events": ends / COUNT,
        }
        assert all(abs(readings[name] - time) < 1e-9 for name, time in expected.items())
    readings = simulate(1.0, before=1000.0)
    show("1 µs, behind 1,000 µs of work", readings)
    assert readings["events"] == 1  # the queue is never empty: kernels alone
    assert readings["host, waits"] == 11  # the host's clock includes the work before
    assert simulate(1.0, before=100.0)["events"] > 4  # too little work to hide the launches

    if not torch.accelerator.is_available():
        print("no GPU: the model alone")
        return
    device = torch.accelerator.current_accelerator()
    work = torch.randn(4096, 4096, device=device)
    print("\nmeasured")
    for n in (1 << 12, 1 << 24):
        x = torch.zeros(n, device=device)
        for title, ahead in ((f"{n:,} elements", None), ("  behind products", work)):
            runs = [measure(x, ahead) for _ in range(6)][1:]
            median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            show(title, median, "≈")
        assert x[0].item() == 2 * 6 * COUNT


if __name__ == "__main__":
    main()
