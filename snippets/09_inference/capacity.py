"""How many GPUs a load needs: the batch that memory and the latency limit allow, and its rate.

The numbers come from published sizes and data sheets. A step reads the weights and the caches
once. A token needs 2Ψ FLOPs, where Ψ leaves out the input embeddings, because they are looked
up. Real kernels reach only a fraction of the rates in the data sheets, which `--efficiency`
sets. A simulation step by step checks the formula.
"""

import argparse
import math
from dataclasses import dataclass, replace


# --8<-- [start:model]
@dataclass
class Model:
    name: str
    parameters: float
    multiplied: float  # Ψ: of these, all but the input embeddings
    cache_bytes: int  # of one token
    gpus: int  # for one copy of the model


@dataclass
class Load:
    requests: float  # a second
    prompt: int
    answer: int
    gap: float  # limit on the seconds between tokens
    computed: float = 1.0  # fraction of the prompt that is not in the cache


MEMORY, BANDWIDTH, FLOPS = 80e9, 3.35e12, 989e12  # H100 SXM


def plan(model: Model, load: Load, weight_bytes: float, efficiency: float) -> dict:
    """Limits of one copy, and how many copies the load needs; 0 if no batch is possible."""
    weights = model.parameters * weight_bytes
    rate, speed = (model.gpus * x * efficiency for x in (BANDWIDTH, FLOPS))
    room = 0.9 * model.gpus * MEMORY - weights
    held = (load.prompt + load.answer / 2) * model.cache_bytes  # a sequence, half-way
    by_memory = int(room / held)

    prefill = 2 * model.multiplied * load.computed * load.prompt / speed  # s, of one request
    token = held / rate + 2 * model.multiplied / speed  # of one more sequence, a step
    fixed = model.multiplied * weight_bytes / rate  # of a step
    by_gap = int((load.gap - fixed) / (token + prefill / load.answer))
    batch = min(by_memory, by_gap)
    limits = {"weights": weights, "by_memory": by_memory, "by_gap": by_gap}
    if batch < 1:  # not even one sequence fits or is in time
        return limits | {"copies": 0}
    # a step also does its share of prefill: every sequence brings one prompt in `answer` steps
    step = fixed + batch * (token + prefill / load.answer)
    served = batch / (load.answer * step)  # Little: batch = rate · time in the system
    copies = math.ceil(load.requests / (0.7 * served))  # at 70% utilisation queues stay short
    return limits | {"step": step, "served": served, "copies": copies}


# --8<-- [end:model]


def simulated(model: Model, load: Load, weight_bytes: float, efficiency: float, batch: int):
    """Requests per second of one copy, step by step: always `batch` sequences, each its age."""
    rate, speed = (model.gpus * x * efficiency for x in (BANDWIDTH, FLOPS))
    ages = [i * load.answer // batch for i in range(batch)]  # evenly spread
    clock, finished = 0.0, 0
    for _ in range(2 * load.answer):
        cached = sum(load.prompt + age for age in ages)
        tokens = batch + load.computed * load.prompt * ages.count(0)  # new ones bring a prompt
        clock += (model.multiplied * weight_bytes + cached * model.cache_bytes) / rate
        clock += 2 * model.multiplied * tokens / speed
        finished += ages.count(load.answer - 1)
        ages = [(age + 1) % load.answer for age in ages]  # its place goes to the next
    return finished / clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--efficiency", type=float, default=0.5)
    efficiency = parser.parse_args().efficiency
    if not 0 < efficiency <= 1:
        parser.error("the efficiency lies above 0 and is at most 1")
    small = Model("Llama 3 8B", 8.03e9, 7.50e9, 2 * 32 * 8 * 128 * 2, 1)
    large = Model("Llama 3 70B", 70.6e9, 69.5e9, 2 * 80 * 8 * 128 * 2, 4)
    assert small.cache_bytes == 128 * 2**10 and large.cache_bytes == 320 * 2**10
    share = f"H100 at {efficiency:.0%} of its bandwidth and FLOP/s"
    print(f"{share}; 50 requests/s of 2,000 + 300 tokens")
    print("model         weights   gap   batch: memory   SLO   step    requests/s   GPUs")
    rows = [(small, 2, 0.100, 1, 1), (small, 2, 0.050, 1, 1), (small, 2, 0.020, 1, 1)]
    rows += [(small, 1, 0.020, 1, 1), (small, 1, 0.020, 0.5, 1), (large, 2, 0.050, 1, 1)]
    rows += [(large, 1, 0.050, 1, 1), (large, 1, 0.050, 0.5, 1), (large, 2, 0.050, 1, 0.1)]
    gpus, worst = [], 0.0
    for model, weight_bytes, gap, cache, computed in rows:
        sized = replace(model, cache_bytes=int(cache * model.cache_bytes))
        load = Load(50, 2000, 300, gap, computed)
        p = plan(sized, load, weight_bytes, efficiency)
        gpus.append(p["copies"] * model.gpus)
        note = "   8-bit cache" * (cache < 1) + "   9/10 of the prompt shared" * (computed < 1)
        print(
            f"{model.name:12} {p['weights'] / 1e9:5.0f} GB {1e3 * gap:4.0f} ms "
            f"{max(p['by_memory'], 0):8} {max(p['by_gap'], 0):9}   ",
            end="",
        )
        if not p["copies"]:
            print(f"not one sequence fits or keeps the promise{note}")
            continue
        print(f"{1e3 * p['step']:4.1f} ms {p['served']:8.1f} {gpus[-1]:8}{note}")
        assert p["step"] <= gap
        batch = min(p["by_memory"], p["by_gap"])
        stepped = simulated(sized, load, weight_bytes, efficiency, batch)
        assert abs(p["served"] / stepped - 1) < 0.01, "the means do not describe the steps"
        worst = max(worst, abs(p["served"] / stepped - 1))
        fewer = simulated(sized, load, weight_bytes, efficiency, batch // 2)
        assert fewer < 0.95 * stepped, "half the sequences would serve as many requests"
    print(f"the same rows step by step: requests/s within {100 * worst:.1f}% of the formula")
    for impossible in (replace(large, gpus=1), replace(large, multiplied=10 * 69.5e9)):
        p = plan(impossible, Load(50, 2000, 300, 0.050), 2, efficiency)
        assert p["copies"] == 0 and min(p["by_memory"], p["by_gap"]) < 1
    if efficiency == 0.5:
        assert gpus[0] < gpus[1] < gpus[2] > gpus[3], (
            "a tight limit needs more GPUs, 8-bit weights fewer"
        )
        assert gpus[8] < gpus[7] < gpus[5], "sharing the prompt saves less than 8 bits"


if __name__ == "__main__":
    main()
