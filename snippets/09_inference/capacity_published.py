"""The plan of capacity.py compared with published measurements, the worst rows first.

Every published row names the model, the GPUs, the lengths and the number of requests in
progress. The plan gets the same numbers. It assumes half of the rates in the data sheet, and
weights, products and cache in 8 bits.
"""

import math
import statistics
from dataclasses import dataclass

MEMORY, BANDWIDTH, FLOPS = 80e9, 3.35e12, 1979e12  # H100 SXM; products in fp8
EFFICIENCY = 0.5


@dataclass
class Copy:
    """A model, and the number of GPUs for one copy of it."""

    name: str
    parameters: float
    multiplied: float  # Ψ: of these, all but the input embeddings
    cache_bytes: int  # of one token
    gpus: int


COPIES = {
    model.name: model
    for model in (
        Copy("8B", 8.03e9, 7.50e9, 2 * 32 * 8 * 128, 1),
        Copy("70B", 70.6e9, 69.5e9, 2 * 80 * 8 * 128, 2),
        Copy("405B", 405.9e9, 403.8e9, 2 * 126 * 8 * 128, 8),
    )
}

# --8<-- [start:published]
# TensorRT-LLM 1.0, performance overview: H100 SXM, fp8, requests at an infinite rate.
LENGTHS = [(128, 128), (128, 2048), (128, 4096), (500, 2000), (1000, 1000), (1000, 2000)]
LENGTHS += [(2048, 128), (2048, 2048), (5000, 500), (20000, 2000)]
TENSORRT_LLM = {  # tokens/s of one copy, for prompts and answers of these lengths
    "8B": (28312, 22714, 14325, 17660, 15220, 13899, 3450, 9305, 3459, 1351),
    "70B": (6378, 6651, 4199, 5222, 4205, 4146, 762, 3082, 898, 437),
    "405B": (3627, 4340, 3116, 3994, 2919, 2895, 453, 2296, 610, 345),
}
# NIM 1.8.0, Llama 3.3 70B: two H100, fp8, 5,000 + 500 tokens; requests under way: tokens/s.
NIM = {1: 51.67, 5: 218.48, 25: 623.4, 50: 814.37, 100: 917.26, 250: 920.12}


def predicted(
    model: Copy,
    prompt: int,
    answer: int,
    under_way: float = math.inf,
    reads: float = EFFICIENCY,
) -> float:
    """Tokens per second of one copy: the batch over its step, as capacity.py counts them."""
    rate, speed = model.gpus * BANDWIDTH * reads, model.gpus * FLOPS * EFFICIENCY
    held = (prompt + answer / 2) * model.cache_bytes
    batch = min(under_way, (0.9 * model.gpus * MEMORY - model.parameters) // held)
    prefill = 2 * model.multiplied * prompt / speed
    token = held / rate + 2 * model.multiplied / speed + prefill / answer
    return batch / (model.multiplied / rate + batch * token)


# --8<-- [end:published]


def main() -> None:
    rows = [
        ("TensorRT-LLM", name, *lengths, math.inf, measured)
        for name, column in TENSORRT_LLM.items()
        for lengths, measured in zip(LENGTHS, column, strict=True)
    ]
    rows += [("NIM", "70B", 5000, 500, under_way, y) for under_way, y in NIM.items()]
    judged = []
    for engine, name, prompt, answer, under_way, measured in rows:
        plan = predicted(COPIES[name], prompt, answer, under_way)
        judged.append(
            (plan / measured, engine, name, prompt, answer, under_way, plan, measured)
        )
    judged.sort(key=lambda row: -abs(math.log(row[0])))
    print(f"H100 at {EFFICIENCY:.0%} of its bandwidth and FLOP/s, fp8: tokens/s of one copy")
    print("engine        model    prompt + answer   under way   published   predicted   ratio")
    for ratio, engine, name, prompt, answer, under_way, plan, measured in judged:
        many = "full" if under_way == math.inf else under_way
        print(f"{engine:12} {name:>4} ×{COPIES[name].gpus} {prompt:10} + {answer:<8} {many:>9} "
              f"{measured:11.0f} {plan:11.0f} {ratio:7.2f}")  # fmt: skip
    for name in COPIES:
        ratios = [ratio for ratio, engine, model, *_ in judged if model == name]
        print(f"{name}: predicted over published {min(ratios):.2f} to {max(ratios):.2f}, "
              f"median {statistics.median(ratios):.2f}")  # fmt: skip
    assert all(0.6 < row[0] < 1.4 for row in judged), (
        "half of the data sheet does not describe this row"
    )
    faster = [
        predicted(COPIES[name], prompt, answer, reads=0.75) / measured
        for _, name, prompt, answer, _, measured in rows
        if name == "8B" and answer >= 1000
    ]
    print(f"8B, answers of 1,000 and more, at 75% of the bandwidth: {min(faster):.2f} to "
          f"{max(faster):.2f}")  # fmt: skip
    # an answer of 4,096 tokens reads caches all the time: in 16 bits not even at the full rate
    eight = COPIES["8B"]
    room = 0.9 * MEMORY - eight.parameters
    bound = (
        room / ((128 + 2048) * 2 * eight.cache_bytes) / ((room + eight.multiplied) / BANDWIDTH)
    )
    print(f"128 + 4096 on the 8B with a 16-bit cache: at most {bound:.0f} tokens/s at 100%")
    assert bound < TENSORRT_LLM["8B"][2]


if __name__ == "__main__":
    main()
