"""Megatron-LM's weak-scaling table recomputed: parameters, FLOPs, time, and the bubble.

Narayanan et al. (2021), Table 1, has seven models on 32 to 3,072 A100s. The shape of a model
gives its parameters, 12Lh²(1 + 13/12h + (V+s)/12Lh), and the FLOPs of an iteration with
recomputation, 96BsLh²(1 + s/6h + V/16Lh). With the TFLOP/s of the paper, these give the seconds
of an iteration and the days of a run, 8ΨD/(nX). The bubble (p-1)/m is for micro-batches of one
sequence and a schedule that is not interleaved. The last column is the speed of a stage while
it works, if the run had this bubble.
"""

VOCABULARY, SEQUENCE, PEAK = 51200, 2048, 312e12

ROWS = [  # billions as published, heads, h, layers, TP, PP, GPUs, batch, TFLOP/s as published
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
]


def parameters(h: int, layers: int) -> float:
    v, s = VOCABULARY, SEQUENCE
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h))


def flops(batch: int, h: int, layers: int) -> float:
    """Of one iteration, every layer's forward counted twice."""
    v, s = VOCABULARY, SEQUENCE
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h))


def training_days(tokens: float, size: float, gpus: int, speed: float) -> float:
    return 8 * tokens * size / (gpus * speed) / 86400


def main() -> None:
    print("published  formula   error  8ΨT/FLOPs  iteration  % of peak   (p-1)/m  while busy")
    for billions, _, h, layers, tp, pp, gpus, batch, tflops in ROWS:
        size, work = parameters(h, layers), flops(batch, h, layers)
        replicas = gpus // (tp * pp)
        micro_batches = batch // replicas  # of one sequence
        bubble = (pp - 1) / micro_batches
        seconds = work / (gpus * tflops * 1e12)
        simple = 8 * size * batch * SEQUENCE / work
        peak = tflops * 1e12 / PEAK
        error = size / (billions * 1e9) - 1
        assert round(size / 1e9, 1) == billions  # what differs is the rounding
        print(
            f"{billions:8.1f}B {size / 1e9:7.1f}B {error:+7.1%} {simple:10.3f} {seconds:8.1f} s"
            f" {peak:10.0%} {bubble:9.1%} {tflops * (1 + bubble):9.0f} TFLOP/s"
        )
    for name, tokens, size, gpus, speed, published in (
        ("GPT-3 175B", 300e9, 175e9, 1024, 140e12, 34),
        ("1T", 450e9, 1008e9, 3072, 163e12, 84),
    ):
        days = training_days(tokens, size, gpus, speed)
        assert abs(days - published) < 0.5
        print(f"{name} on {gpus:,} GPUs: 8ΨD/(nX) = {days:.1f} days, published {published}")
    for v in (1, 2, 4):
        print(f"1T, PP 64, interleaved with v = {v}: bubble (p-1)/(vm) = {63 / (v * 512):.1%}")


if __name__ == "__main__":
    main()
