"""What events measure: kernels, and the gaps between them while the host is too slow.

The host needs LAUNCH for each kernel, the device does them in order, and an event is reached
when the device comes to it. That is enough to say what the host's clock and two events show for
100 kernels, with and without work before the first event. On a GPU the same is measured.
"""

import statistics
import time

import torch

LAUNCH, COUNT = 5.0, 100  # µs, an assumption; kernels between two events


# --8<-- [start:model]
def simulate(kernel: float, before: float = 0.0) -> dict[str, float]:
    """µs that each clock shows for a kernel, with `before` µs of work in the queue already."""
    host, device = 0.0, before  # when each is free
    first = device  # the first event is reached when what was before it is done
    for _ in range(COUNT):
        host += LAUNCH
        device = max(device, host) + kernel
    readings = {"host, no wait": host, "host, waits": device, "events": device - first}
    return {name: time / COUNT for name, time in readings.items()}


# --8<-- [end:model]


# --8<-- [start:measure]
def measure(x: torch.Tensor, work: torch.Tensor | None) -> dict[str, float]:
    """The same on a GPU: `x` is what each kernel writes, `work` is multiplied before."""
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
    assert readings["events"] == 1  # the queue never runs dry: kernels alone
    assert readings["host, waits"] == 11  # the host's clock has the work in it, too
    assert simulate(1.0, before=100.0)["events"] > 4  # too little to hide the launches behind

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
