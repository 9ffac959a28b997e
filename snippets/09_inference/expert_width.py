"""More GPUs for the experts of DeepSeek-V3 help until the network limits the decode step.

Attention is data parallel: a GPU reads all attention weights and the caches of its own
requests. Each of n GPUs stores 288/n experts of a layer, because 32 of the 256 experts have a
second copy. With more GPUs, a GPU stores and reads fewer experts, more caches fit, and each
expert gets more tokens. However, the bytes that a token sends do not shrink.

The estimate assumes half of the data sheet for memory and products. For the network it assumes
the 40 GB/s that DeepEP reports for 128 GPUs and more, whose network cards have 50 GB/s. Compare
the predicted rates with the published rates in the second table.
"""

import math
from dataclasses import dataclass, replace

# --8<-- [start:shape]
H, LAYERS, SPARSE, HEADS, K, SLOTS = 7168, 61, 58, 128, 8, 288
EXPERT = 3 * H * 2048  # parameters
EMBEDDING = 129_280 * H
OTHER = 671e9 - SPARSE * 256 * EXPERT - EMBEDDING  # attention, shared experts, the head
LATENT, ROTARY = 512, 64  # elements that are cached for each token and layer
ATTEND = 2 * LAYERS * HEADS * (2 * LATENT + ROTARY)  # FLOPs for each cached token
# bytes for each request: rows in 16 bits with scales, two to send and two to receive per expert
BUFFERS = 4 * SLOTS * (2 * H + 4 * H // 128)
ALPHA = 10e-6


@dataclass
class GPU:
    name: str
    memory: float
    bandwidth: float
    flops: float  # rates of the experts' products, of other products, of attention
    others: float
    attention: float
    link: float  # bytes per second of an all-to-all
    expert_byte: float = 1.0  # bytes of a parameter
    out: float = 1 + 4 / 128  # bytes of an element on its way to an expert; it returns in 2
    cached: float = 2.0


H100 = GPU("H100", 80e9, 3.35e12 / 2, 1979e12 / 2, 1979e12 / 2, 989e12 / 2, 40e9)
H800 = replace(H100, name="H800")  # its NVLink is slower, but this estimate does not use it
NVL72 = GPU(
    "GB200", 186e9, 8e12 / 2, 10e15 / 2, 5e15 / 2, 5e15 / 2, 900e9 / 2, 9 / 16, 9 / 16, 1
)


# --8<-- [end:shape]


# --8<-- [start:step]
def weight_bytes(gpu: GPU, n: int) -> float:
    """Return the bytes of weights on each of n GPUs."""
    return OTHER + EMBEDDING + SLOTS / n * SPARSE * EXPERT * gpu.expert_byte


def capacity(gpu: GPU, n: int, context: float) -> int:
    """Return how many requests fit into 90% of the memory of one GPU."""
    each = context * LAYERS * (LATENT + ROTARY) * gpu.cached + BUFFERS
    return int((0.9 * gpu.memory - weight_bytes(gpu, n)) / each)


def step(gpu: GPU, n: int, batch: float, context: float, halves: int = 1) -> dict[str, float]:
    """Return the seconds of a step with `batch` requests on each of n GPUs."""
    rows = batch / halves
    # experts of a layer that the slowest GPU reads: the union of the choices, at least 1
    touched = max(1.0, SLOTS / n * (1 - (1 - K / SLOTS) ** (n * rows)))
    cached = batch * context
    part = {
        "experts": halves * SPARSE * EXPERT
        * max(touched * gpu.expert_byte / gpu.bandwidth, 2 * K * rows / gpu.flops),
        "others": halves * OTHER * max(1 / gpu.bandwidth, 2 * rows / gpu.others),
        "attention": cached * max(
            LAYERS * (LATENT + ROTARY) * gpu.cached / gpu.bandwidth, ATTEND / gpu.attention
        ),
        "travel": halves * SPARSE
        * (2 * ALPHA + K * rows * H * (gpu.out + 2) * (n - 1) / n / gpu.link),
    }  # fmt: skip
    compute = part["experts"] + part["others"] + part["attention"]
    whole = max(compute, part["travel"]) if halves == 2 else compute + part["travel"]
    return part | {"step": whole}


# --8<-- [end:step]


def tensor_parallel(gpu: GPU, n: int, batch: float, context: float) -> float:
    """Return the seconds of a step if n GPUs share each request and read its whole cache."""
    touched = SPARSE * 256 * EXPERT * (1 - (1 - K / 256) ** batch)
    cache = batch * context * LAYERS * (LATENT + ROTARY) * gpu.cached
    reads = ((OTHER + touched) / n + cache) / gpu.bandwidth  # few rows, so bytes decide
    return reads + 2 * LAYERS * (ALPHA + 2 * batch * H * 2 / (450e9 / 2))  # all-reduces


# --8<-- [start:published]
PUBLISHED = [  # GPU, how many, requests on each, cached tokens, micro-batches, tokens/s and GPU
    ("SGLang, May 2025", H100, 72, 256, 2000, 2, 22_282 / 8),
    ("  without overlap", H100, 72, 256, 2000, 1, 22_310 / 8 / 1.255),
    ("SGLang, Sept 2025", NVL72, 48, 1408, 2000, 1, 13_386),
    ("DeepSeek, Feb 2025", H800, 144, 14_800 / 8 / 21, 4989, 2, 14_800 / 8),
]
FULL = [("SGLang, May 2025", H100, 72, 2000, 256), ("SGLang, Sept 2025", NVL72, 48, 2000, 1408),
        ("SGLang, Sept 2025", NVL72, 48, 4000, 768)]  # fmt: skip
# --8<-- [end:published]


def best(gpu: GPU, n: int, batch: float, context: float) -> dict[str, float]:
    """Return the faster one of two ways: one micro-batch or two."""
    ways = [step(gpu, n, batch, context, halves) for halves in (1, 2)]
    return min(ways, key=lambda parts: parts["step"])


def main() -> None:
    context, promise = 2050, 0.030
    print(
        f"DeepSeek-V3, {context} tokens cached for each request, as many as fit: ms of a step,"
    )
    print("tokens/s and GPU, and the same where a step may last at most 30 ms")
    print("GPU     n  weights  batch  tokens an  experts  others  attention  travel   step"
          "  tokens/s  at 30 ms")  # fmt: skip
    print("           on each  on each   expert")
    rates = {}
    for gpu, widths in ((H100, (16, 32, 72, 144, 288)), (NVL72, (8, 24, 72))):
        for n in widths:
            fit = capacity(gpu, n, context)
            parts = best(gpu, n, fit, context)
            quick = [b / best(gpu, n, b, context)["step"] for b in range(1, fit + 1)
                     if best(gpu, n, b, context)["step"] <= promise]  # fmt: skip
            rates[gpu.name, n] = fit / parts["step"], max(quick, default=0.0)
            ms = {name: 1e3 * seconds for name, seconds in parts.items()}
            print(f"{gpu.name:5} {n:3} {weight_bytes(gpu, n) / 1e9:5.0f} GB {fit:8}"
                  f" {fit * n * K / SLOTS:8.0f} {ms['experts']:9.1f} {ms['others']:7.1f}"
                  f" {ms['attention']:10.1f} {ms['travel']:7.1f} {ms['step']:6.1f}"
                  f" {rates[gpu.name, n][0]:9.0f} {rates[gpu.name, n][1]:9.0f}")  # fmt: skip
    assert rates["H100", 72][0] > 3 * rates["H100", 16][0] and (
        abs(rates["H100", 288][0] / rates["H100", 72][0] - 1) < 0.02
    ), "wide wins until the network is full"
    assert rates["H100", 288][1] > 2 * rates["H100", 72][1], "and longer where steps are short"
    n = 16
    batch = int((0.9 * H100.memory - 671e9 / n) / (context * LAYERS * (LATENT + ROTARY) * 2))
    shared = tensor_parallel(H100, n, batch, context)
    print(f"{n} H100 with tensor-parallel attention: {batch} requests in all, "
          f"{batch / n / shared:.0f} tokens/s and GPU, {1 / shared:.1f} a request")  # fmt: skip
    alone = step(H100, n, 1 / n, context)["step"]
    split = tensor_parallel(H100, n, 1, context)
    print(f"one request alone on {n} H100: {1e3 * alone:.1f} ms a token, "
          f"tensor parallel {1e3 * split:.1f}")  # fmt: skip
    ceiling = H100.link / (SPARSE * K * H * (H100.out + 2))
    print(f"limit of the network: {ceiling:.0f} tokens/s and H100, for any number of GPUs")

    print("published                     n  batch  cached   tokens/s and GPU  predicted  ratio")
    judged = []
    for name, gpu, n, batch, cached, halves, measured in PUBLISHED:
        plan = batch / step(gpu, n, batch, cached, halves)["step"]
        judged.append((plan / measured, name, gpu.name, n, batch, cached, measured, plan))
    for ratio, name, gpu, n, batch, cached, measured, plan in sorted(
        judged, key=lambda row: -abs(math.log(row[0]))
    ):
        print(f"{name:19} {gpu:6} {n:5} {batch:6.0f} {cached:7} {measured:14.0f} {plan:14.0f} "
              f"{ratio:8.2f}")  # fmt: skip
    for name, gpu, n, cached, batch in FULL:
        print(f"{name}, {gpu.name}, {cached} cached: {batch} requests, room for "
              f"{capacity(gpu, n, cached)}")  # fmt: skip
    print("two micro-batches instead of one, 72 H100, 2000 cached:")
    gains = {}
    for batch in (32, 64, 128, 256):
        one, two = (step(H100, 72, batch, 2000, halves)["step"] for halves in (1, 2))
        gains[batch] = one / two
    print(
        "  " + ", ".join(f"{batch} requests {gain - 1:+.0%}" for batch, gain in gains.items())
    )
    assert all(0.7 < row[0] < 1.4 for row in judged), (
        "half of the data sheet does not explain a published rate"
    )
    for gpu, seconds in (  # a cache of 16 bits waits for reading, one of 8 bits for products
        (H100, LAYERS * (LATENT + ROTARY) * 2 / H100.bandwidth),
        (replace(H100, cached=1), ATTEND / H100.attention),
    ):
        assert math.isclose(step(gpu, 72, 10, 2000)["attention"], 20_000 * seconds)
    assert gains[32] < 0.85 and gains[64] < 1.1 < gains[128], "where overlap begins to pay"


if __name__ == "__main__":
    main()
