"""What "GPU utilisation 100%" does not tell you: four timelines, of which three reach 100%.

NVML reports the fraction of the sampling period in which at least one kernel was running. The
number of SMs that the kernel used, and the work that they did, do not matter. Simulated.
"""

from dataclasses import dataclass

SMS, PEAK = 132, 989e12  # an H100's multiprocessors, and bf16 FLOP/s by its datasheet


@dataclass
class Kernel:
    start: float  # ms
    end: float
    blocks: int  # each keeps one SM busy
    flops: float


# --8<-- [start:readings]
def utilisation(kernels: list[Kernel], begin: float, end: float) -> float:
    """As in NVML: the fraction of [begin, end] in which at least one kernel runs."""
    covered, until = 0.0, begin
    for kernel in sorted(kernels, key=lambda k: k.start):
        start, stop = max(kernel.start, until), min(kernel.end, end)
        if stop > start:
            covered, until = covered + stop - start, stop
    return covered / (end - begin)


def sm_activity(kernels: list[Kernel], begin: float, end: float) -> float:
    """As in DCGM: the fraction of the time with a block on an SM, averaged over SMs."""
    busy = sum((k.end - k.start) * min(k.blocks, SMS) for k in kernels)
    return busy / (end - begin) / SMS


def flops_share(kernels: list[Kernel], begin: float, end: float) -> float:
    return sum(k.flops for k in kernels) / ((end - begin) * 1e-3 * PEAK)


# --8<-- [end:readings]


def back_to_back(length: float, gap: float, blocks: int, rate: float) -> list[Kernel]:
    """Kernels of `length` ms with gaps of `gap` ms, over 1,000 ms. `rate` is in FLOP/s."""
    period, flops = length + gap, rate * length * 1e-3
    return [
        Kernel(i * period, i * period + length, blocks, flops)
        for i in range(int(1000 / period + 1e-9))
    ]


def main() -> None:
    spans = [(2, 5), (0, 3), (8, 12)]  # of [0, 10]: from 0 to 5, and from 8 to 10
    assert utilisation([Kernel(*span, 1, 0.0) for span in spans], 0, 10) == 0.7
    partial = [Kernel(10, 14, 33, 2e-3 * PEAK), Kernel(15, 20, 66, 1e-3 * PEAK)]
    # 9 of 10 ms, 462 of 132 × 10 SM ms, and 0.003 * PEAK of 0.010 * PEAK operations
    by_hand = (0.9, (4 * 33 + 5 * 66) / 1320, 0.3)
    for f, value in zip((utilisation, sm_activity, flops_share), by_hand, strict=True):
        assert abs(f(partial, 10, 20) - value) < 1e-12
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
        # on any SM at all <= averaged over SMs <= FLOPs, as nothing runs faster than the peak
        assert shares[2] <= shares[1] + 1e-9 and shares[1] <= shares[0] + 1e-9


if __name__ == "__main__":
    main()
