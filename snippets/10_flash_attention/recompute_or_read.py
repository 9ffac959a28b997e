"""Backward needs the weights again: written and read, or computed a second time?

For one weight, in seconds: g bytes written in forward and g read in backward, against 2d FLOPs
on tensor cores and one exponential. Rates are the datasheets' (bf16, dense); exponentials are
16 a clock and multiprocessor.
"""

from itertools import pairwise

GPUS = {  # TFLOP/s, GB/s, multiprocessors, GHz of the boost clock
    "A100": (312, 2039, 108, 1.41),
    "H100": (989, 3350, 132, 1.83),
    "H200": (989, 4800, 132, 1.83),
}


# --8<-- [start:times]
def picoseconds(gpu: str, d: int, g: int = 2) -> tuple[float, float, float]:
    """Time for one weight: to write and read it, to multiply it anew, to exponentiate it."""
    tflops, bandwidth, processors, clock = GPUS[gpu]
    moved = 2 * g / (bandwidth * 1e9)
    multiplied = 2 * d / (tflops * 1e12)
    exponential = 1 / (16 * processors * clock * 1e9)
    return moved * 1e12, multiplied * 1e12, exponential * 1e12


# --8<-- [end:times]


def main() -> None:
    print("ps for one weight    d   write + read   product   exp   kept / recomputed")
    ratios = {}
    for gpu in GPUS:
        for d in (64, 128, 256):
            moved, product, exponential = picoseconds(gpu, d)
            ratios[gpu, d] = moved / (product + exponential)
            print(
                f"{gpu:15} {d:6} {moved:14.2f} {product:9.2f} {exponential:5.2f} "
                f"{ratios[gpu, d]:14.1f}"
            )
    assert all(ratio > 1.1 for (_, d), ratio in ratios.items() if d <= 128)
    assert all(
        ratios[gpu, a] > ratios[gpu, b] for gpu in GPUS for a, b in pairwise((64, 128, 256))
    )
    s, a, layers = 8192, 32, 32
    kept = 2 * a * s * s * layers
    statistic = 4 * a * s * layers
    print(f"s = {s}, {a} heads, {layers} layers: weights {kept / 2**30:.0f} GiB in bf16, "
          f"log-sum-exp {statistic / 2**20:.0f} MiB in fp32")  # fmt: skip


if __name__ == "__main__":
    main()
