"""Computes how long a decoding step waits for weights, and from which batch on it computes.

A decoder that writes one token for each of b sequences reads every weight once and performs 2b
operations with it. The program divides these bytes and operations by the rates in an H100's
datasheet. Then it measures a product on this machine with 1 to 64 rows. Draws decode_bytes.svg.
"""

import statistics
import time

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

BANDWIDTH, PEAK = 3350e9, 989e12  # H100 SXM: bytes/s, dense bf16 operations/s
MODELS = {"Llama 3 8B": (8.03e9, 128 * 2**10), "Llama 3 70B": (70.6e9, 320 * 2**10)}
FORMATS = {"bf16": 16, "int8 per channel": 8, "int4, groups of 128": 4 + 16 / 128,
           "int4, groups of 32": 4 + 16 / 32}  # bits per weight, scales in 16 bits  # fmt: skip


# --8<-- [start:bounds]
def seconds_per_step(bits: float, parameters: float, cache: float, batch: int) -> float:
    """The least time for `batch` tokens: bytes at full bandwidth, or products at full speed.

    `cache` is the KV cache of one sequence in bytes. Weights are read once for the whole batch.
    Each sequence also needs its own cache. The products are computed in bf16.
    """
    reading = (parameters * bits / 8 + batch * cache) / BANDWIDTH
    computing = 2 * parameters * batch / PEAK
    return max(reading, computing)


def batch_of_balance(bits: float) -> float:
    """The b at which 2·Ψ·b / PEAK equals Ψ·bits/8 / BANDWIDTH, without a cache."""
    return bits / 8 / 2 * PEAK / BANDWIDTH


def context_of_balance(parameters: float, cache_per_token: float) -> float:
    """The tokens from which on reading a cache takes longer than the products of a sequence."""
    return 2 * parameters * BANDWIDTH / PEAK / cache_per_token


# --8<-- [end:bounds]


def measure(batches: list[int]) -> tuple[int, dict[int, float]]:
    """Return bytes of the weight, median seconds of [b, 4096] × [4096, 4096] in fp32."""
    weight = torch.randn(4096, 4096)  # 64 MiB: more than most caches contain
    seconds = {}
    for batch in batches:
        x = torch.randn(batch, 4096)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            y = F.linear(x, weight)
            times.append(time.perf_counter() - start)
        assert y.shape == (batch, 4096)
        # each output needs a whole row of the weight
        torch.testing.assert_close(y[:, ::512], x @ weight[::512].T, atol=1e-2, rtol=0)
        seconds[batch] = statistics.median(times[1:])
    return weight.nbytes, seconds


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "decode_bytes", "font.size": 11}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    corners = [batch_of_balance(bits) for bits in (16, 8, 4.5)]
    batches = sorted([2 ** (i / 4) for i in range(45)] + corners)
    lines = {"bf16": (16, "#c2410c"), "int8": (8, "#0b6e99"), "int4, 32": (4.5, "#15803d")}
    for name, (bits, colour) in lines.items():
        step = [seconds_per_step(bits, 8.03e9, 0, batch) * 1e3 for batch in batches]
        axes.plot(batches, step, color=colour, linewidth=2)
        axes.text(0.9, step[0], name, color=colour, ha="right", va="center")
    axes.set(xscale="log", yscale="log", xlim=(0.35, 2048), ylim=(0.8, 60))
    axes.set(xlabel="sequences in the batch, b", ylabel="least time of a step (ms)")
    ticks = [1, 4, 16, 64, 256, 1024]
    axes.set_xticks(ticks, ticks)
    axes.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("decode_bytes.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    torch.set_num_threads(1)
    context = 4096
    for name, (parameters, cache_per_token) in MODELS.items():
        cache = cache_per_token * context
        print(f"{name}, one H100's bandwidth, {context:,} tokens of context "
              f"({cache / 1e9:.2f} GB of cache a sequence)")  # fmt: skip
        print("                         bits  weights   tokens/s, 1 sequence   16 sequences")
        for label, bits in FORMATS.items():
            one = 1 / seconds_per_step(bits, parameters, cache, 1)
            many = 16 / seconds_per_step(bits, parameters, cache, 16)
            print(f"  {label:20}{bits:7.3f}  {parameters * bits / 8e9:5.1f} GB {one:15.0f} "
                  f"{many:18.0f}")  # fmt: skip
    print("reading and computing take the same time, without a cache, at a batch of")
    for label, bits in FORMATS.items():
        print(f"  {label:20}{batch_of_balance(bits):6.0f}")
        one, even, twice = (seconds_per_step(bits, 1e9, 0, int(batch_of_balance(bits) * x) or 1)
                            for x in (0, 1, 2))  # fmt: skip
        assert one == even and twice > 1.9 * one
    # between the two points int4 waits for arithmetic and bf16 still for memory
    bf16, int4 = batch_of_balance(16), batch_of_balance(4.5)
    print("how much faster than bf16 int4 in groups of 32 can be, without a cache")
    for batch in (1, 64, 128, 256, 512):
        times = [seconds_per_step(bits, 8.03e9, 0, batch) for bits in (16, 4.5)]
        gain = times[0] / times[1]
        print(f"  b = {batch:3}: {gain:.2f} ×")
        predicted = min(16 / 4.5, max(1, bf16 / batch))
        assert abs(gain / predicted - 1) < 1e-9 and int4 < bf16
    print("arithmetic is the bound at no batch, if the context of each sequence is longer than")
    for name, (parameters, cache_per_token) in MODELS.items():
        tokens = context_of_balance(parameters, cache_per_token)
        print(f"  {name:12}{tokens:6,.0f} tokens")
        for length, waits in ((0.5 * tokens, False), (1.01 * tokens, True)):
            cache = length * cache_per_token
            computing = 2 * parameters * 1e6 / PEAK  # for a million sequences
            assert (seconds_per_step(4.5, parameters, cache, 10**6) > computing) == waits
    parameters, cache = MODELS["Llama 3 8B"][0], MODELS["Llama 3 8B"][1] * context
    for bits in (16, 4.5):
        print(f"  200 sequences of {context:,} tokens, the 8B model in {bits:4} bits: "
              f"{seconds_per_step(bits, parameters, cache, 200) * 1e3:.1f} ms, "
              f"of these {200 * cache / BANDWIDTH * 1e3:.1f} for caches; "
              f"products {2 * parameters * 200 / PEAK * 1e3:.1f}")  # fmt: skip

    draw()
    size, seconds = measure([1, 4, 16, 64])
    assert size == 4 * 4096**2  # fp32
    print("here, a 4096 × 4096 product in fp32")
    for batch, time_of in seconds.items():
        milliseconds = time_of * 1e3
        print(f"  b = {batch:2}: ≈{milliseconds:.1f} ms, ≈{milliseconds / batch:.2f} ms a row, "
              f"≈{size / time_of / 1e9:.1f} GB/s of weights")  # fmt: skip
    assert seconds[64] < 32 * seconds[1]  # the weight is read once for all rows


if __name__ == "__main__":
    main()
