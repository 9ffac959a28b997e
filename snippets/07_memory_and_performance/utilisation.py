"""What "GPU utilisation 100%" does not say: three timelines with the same reading.

NVML's number is the share of the sampling period in which at least one kernel was running. How
many of the multiprocessors it ran on, and what they did there, does not enter. Simulated.
"""

from dataclasses import dataclass

SMS, PEAK = 132, 989e12  # an H100's multiprocessors, and bf16 FLOP/s by its datasheet


@dataclass
class Kernel:
    start: float  # ms
    end: float
    blocks: int  # as many multiprocessors as these keep busy
    flops: float


# --8<-- [start:readings]
def utilisation(kernels: list[Kernel], begin: float, end: float) -> float:
    """NVML's: the share of [begin, end] covered by at least one kernel."""
    covered, until = 0.0, begin
    for kernel in sorted(kernels, key=lambda k: k.start):
        start, stop = max(kernel.start, until), min(kernel.end, end)
        if stop > start:
            covered, until = covered + stop - start, stop
    return covered / (end - begin)


def sm_activity(kernels: list[Kernel], begin: float, end: float) -> float:
    """The share of multiprocessor-time with a block on it (DCGM's SM activity)."""
    busy = sum((k.end - k.start) * min(k.blocks, SMS) for k in kernels)
    return busy / (end - begin) / SMS


def flops_share(kernels: list[Kernel], begin: float, end: float) -> float:
    return sum(k.flops for k in kernels) / ((end - begin) * 1e-3 * PEAK)


# --8<-- [end:readings]


def back_to_back(length: float, gap: float, blocks: int, rate: float) -> list[Kernel]:
    """Kernels of `length` ms with `gap` ms between, over 1,000 ms; `rate` in FLOP/s."""
    period, flops = length + gap, rate * length * 1e-3
    return [
        Kernel(i * period, i * period + length, blocks, flops)
        for i in range(int(1000 / period + 1e-9))
    ]


def main() -> None:
    spans = [(2, 5), (0, 3), (8, 12)]  # of [0, 10] the first 5 and the last 2
    assert utilisation([Kernel(*span, 1, 0.0) for span in spans], 0, 10) == 0.7
    timelines = {
        "one block in a loop": back_to_back(10, 0, 1, PEAK / SMS / 40),
        "copies, bound by memory": back_to_back(1, 0, 1056, 3350e9 / 12),
        "products at 75% of peak": back_to_back(2, 0, 1056, 0.75 * PEAK),
        "the same, with gaps": back_to_back(0.01, 0.01, 1056, 0.75 * PEAK),
    }
    print("                          utilisation   SM activity   FLOPs of peak")
    for name, kernels in timelines.items():
        shares = [f(kernels, 0, 1000) for f in (utilisation, sm_activity, flops_share)]
        print("{:24} {:12.0%} {:13.1%} {:15.3%}".format(name, *shares))


if __name__ == "__main__":
    main()
