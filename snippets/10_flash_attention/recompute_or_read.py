"""On most GPUs it is cheaper to compute an attention weight again than to store and read it.

Storing costs g bytes written in forward and g bytes read in backward. Computing the weight
again costs 2d FLOPs on tensor cores and one exponential. The rates are those of the datasheets
(bf16, dense), and a multiprocessor computes 16 exponentials per clock. The clock of the B200
follows from its 148 multiprocessors, which each compute 8,192 FLOPs per clock (section 3.1 of
FlashAttention-4, arXiv 2603.05451).
"""

from itertools import pairwise

GPUS = {  # TFLOP/s, GB/s, multiprocessors, GHz of the boost clock
    "A100": (312, 2039, 108, 1.41),
    "H100": (989, 3350, 132, 1.83),
    "H200": (989, 4800, 132, 1.83),
    "B200": (2250, 8000, 148, 1.86),
}


# --8<-- [start:times]
def picoseconds(gpu: str, d: int, g: int = 2) -> tuple[float, float, float]:
    """Return the picoseconds to write and read a weight, for its product, and for its exp."""
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
    for gpu, (tflops, _, processors, clock) in GPUS.items():  # tensor cores outgrow exp
        per_clock = tflops * 1e3 / (processors * clock)
        assert abs(per_clock / {"A100": 2048, "B200": 8192}.get(gpu, 4096) - 1) < 0.01
    s, a, layers = 8192, 32, 32
    kept = 2 * a * s * s * layers
    statistic = 4 * a * s * layers
    print(f"s = {s}, {a} heads, {layers} layers: weights {kept / 2**30:.0f} GiB in bf16, "
          f"log-sum-exp {statistic / 2**20:.0f} MiB in fp32")  # fmt: skip


if __name__ == "__main__":
    main()
