"""The size from which a GPU is faster than a CPU, for a vector addition and a matrix product.

The CPU is measured. A GPU is measured if this machine has one, and is modelled otherwise. In
the model every launch takes LAUNCH, data on the host crosses the link, and a kernel takes the
larger of FLOPs / P and bytes / W. The rates are from the datasheet of an H100 SXM: 67 TFLOP/s
in fp32, 3,350 GB/s, PCIe 5.0 x16. LAUNCH is an assumption: replace it by what your machine
shows. In the column "crossing at n" is the size at which CPU and GPU need the same time.
"""

import functools
import math
import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

P, W = 67e12, 3350e9  # FLOP/s, bytes/s
LINK = 32e9 * 16 * 128 / 130 / 8  # 32 GT/s, 16 lanes, 128 of 130 bits are data: 63 GB/s
LAUNCH = 10e-6  # s, from the call in Python to the end of a small kernel or copy
THREADS = torch.get_num_threads()


# --8<-- [start:model]
def modelled(flops: float, moved: float, crossing: float, launches: int = 1) -> float:
    """Return seconds on the GPU. `crossing` bytes use the link, `moved` bytes its memory."""
    return launches * LAUNCH + crossing / LINK + max(flops / P, moved / W)


# --8<-- [end:model]


def seconds(call: Callable, budget: float = 0.03) -> float:
    """Return the least time of five or more calls. A call ends when its work has ended."""
    call()
    best, repeats, end = math.inf, 0, time.perf_counter() + budget
    while repeats < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best, repeats = min(best, time.perf_counter() - start), repeats + 1
    return best


# Each function returns inputs and output, the operator, its FLOPs and its bytes. The output is
# allocated before the clock starts, because otherwise the time would include fresh pages.
def add(n: int) -> tuple[list[torch.Tensor], Callable, float, float]:
    return [torch.randn(n), torch.randn(n), torch.zeros(n)], torch.add, n, 12 * n


def product(n: int) -> tuple[list[torch.Tensor], Callable, float, float]:
    x, y, z = torch.randn(n, n), torch.randn(n, n), torch.zeros(n, n)
    return [x, y, z], torch.mm, 2 * n**3, 12 * n**2


@functools.cache
def on_cpu(make: Callable, n: int) -> float:
    """Return the seconds on the CPU with one thread or with all, whichever is faster."""
    (x, y, out), operator, _, _ = make(n)
    best = math.inf
    for threads in {1, THREADS}:
        torch.set_num_threads(threads)
        best = min(best, seconds(lambda: operator(x, y, out=out), budget=0.05))
    return best


def times(make: Callable, n: int, on_host: bool) -> tuple[float, float]:
    """Return the seconds on the CPU and on the GPU for size `n`."""
    host, operator, flops, moved = make(n)
    assert moved == sum(x.nbytes for x in host)  # both inputs and the output, once each
    cpu = on_cpu(make, n)
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        # from the host: two copies in, the kernel, and a copy out
        return cpu, modelled(flops, moved, moved if on_host else 0, 4 if on_host else 1)
    there = [x.to(device) for x in host]
    if on_host:  # copies at the link's speed need pinned memory
        host = [x.pin_memory() for x in host]

    def call() -> None:
        if on_host:
            for i in range(2):
                there[i].copy_(host[i], non_blocking=True)
        operator(there[0], there[1], out=there[2])
        if on_host:
            host[2].copy_(there[2], non_blocking=True)
        torch.accelerator.synchronize()

    return cpu, seconds(call)


def crossing(make: Callable, sizes: list[int], on_host: bool) -> tuple[float, float]:
    """Return the size at which both need the same time, and CPU / GPU at the largest size."""
    previous = None
    crossed = math.nan
    for n in sizes:
        cpu, gpu = times(make, n, on_host)
        gain = math.log(cpu / gpu)
        if gain > 0 and math.isnan(crossed):
            crossed = n
            if previous:  # straight line between the points, both axes logarithmic
                m, loss = previous
                crossed = m * (n / m) ** (-loss / (gain - loss))
                slope = (gain - loss) / math.log(n / m)
                assert abs(loss + slope * math.log(crossed / m)) < 1e-9  # there it is 0
        previous = (n, gain)
    return crossed, math.exp(previous[1])


def main() -> None:
    torch.manual_seed(0)
    # a second on the link and a second in the kernel, in which FLOPs and bytes overlap
    assert math.isclose(modelled(P, W, LINK), LAUNCH + 2)
    (x, y, _), operator, flops, _ = product(64)
    with FlopCounterMode(display=False) as counter:
        operator(x, y)
    assert flops == counter.get_total_flops()
    measured = torch.accelerator.is_available()
    print(f"the GPU's times are {'measured' if measured else 'modelled, the CPU measured'}")
    print(f"model: {P / 1e12:.0f} TFLOP/s, {W / 1e9:,.0f} GB/s, a launch {LAUNCH * 1e6:.0f} µs")
    lengths = [2**k for k in range(10, 25, 2)]
    widths = [16, 32, 64, 128, 256, 512]
    cases = [
        ("vector add, data on the GPU", add, lengths, False),
        ("product n × n, data on the GPU", product, widths, False),
        ("product n × n, to it and back", product, widths, True),
    ]
    print("operation                        crossing at n   CPU / GPU at the largest n")
    crossed = {}
    for name, make, sizes, on_host in cases:
        n, ratio = crossing(make, sizes, on_host)
        crossed[name] = n
        print(f"{name:32} ≈{n:9.0f}   ≈{ratio:.0f} at {sizes[-1]:,}")

    # copies take time, so a product from the host needs a larger n (or no n is enough: nan)
    assert not crossed[cases[1][0]] >= crossed[cases[2][0]], crossed

    # data on the host: is the link faster than the CPU's own memory?
    n = lengths[-1]
    cpu, gpu = times(add, n, True)
    print(f"vector add of {n:,}, to the GPU and back: CPU ≈{1e3 * cpu:.1f} ms, "
          f"GPU ≈{1e3 * gpu:.2f} ms")  # fmt: skip
    print(f"  at least {12 * n / LINK * 1e3:.2f} ms on a link of {LINK / 1e9:.1f} GB/s; "
          f"the CPU moves ≈{12 * n / cpu / 1e9:.1f} GB/s")  # fmt: skip
    # the model counts two copies in, the kernel and one copy out
    assert measured or math.isclose(gpu, 4 * LAUNCH + 12 * n / LINK + 12 * n / W)
    # a training step of a small network: launches decide
    for width in (64, 1024, 8192):
        flops, launches = 6 * 32 * (3 * width**2), 30
        gpu = modelled(flops, 3 * 3 * 4 * width**2, 0, launches)
        print(
            f"training step, 3 layers of {width}, batch 32, 30 launches: modelled "
            f"{1e6 * gpu:.0f} µs, {launches * LAUNCH / gpu:.0%} of it launches"
        )


if __name__ == "__main__":
    main()
