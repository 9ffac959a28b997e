"""On a CPU without int8 instructions, torch multiplies int8 slower than fp32.

torch calls oneDNN for int8 only where the processor has AVX-512 VNNI (on x86). On every other
processor `torch._int_mm` runs a plain loop. The loop is exact, but dozens to hundreds of times
slower than the fp32 product. This program switches oneDNN off, so it shows the loop on any CPU.
"""

import time
from collections.abc import Callable

import torch

WIDTH = 1024


def fastest_ms(function: Callable[[], object], calls: int = 3) -> float:
    """The fastest of a few calls, in milliseconds. Other work on the machine only adds time."""
    function()  # the first call prepares what later calls reuse
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(False)  # MKL-DNN is an older name of oneDNN
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (WIDTH, WIDTH), generator=generator, dtype=torch.int8)
    print(f"weight of {WIDTH} × {WIDTH}, one core, oneDNN switched off")
    for tokens in (8, 64):
        x = torch.randint(-127, 128, (tokens, WIDTH), generator=generator, dtype=torch.int8)
        # float64 counts exactly to 2^53, and no sum here exceeds 1024 * 127^2 < 2^24
        exact = (x.double() @ weight.double()).int()
        assert torch.equal(torch._int_mm(x, weight), exact)
        x32, weight32 = x.float(), weight.float()
        assert torch.equal(x32 @ weight32, exact.float())  # the same product in both types
        full = fastest_ms(lambda x=x32, w=weight32: x @ w)
        loop = fastest_ms(lambda x=x: torch._int_mm(x, weight))
        times = f"fp32 ≈{full:.2f} ms, int8 in a plain loop ≈{loop:.1f} ms"
        print(f"{tokens:2} tokens: {times}")
        assert loop > 3 * full, (loop, full)
        print(f"           the loop is ≈{loop / full:.0f} times as slow; its sums are exact")


if __name__ == "__main__":
    main()
