"""Computes how large a model fits on a GPU: memory divided by bytes per parameter.

One fifth of the memory stays free for activations, the KV cache, buffers and the allocator.
This fraction is a rule of thumb. Chapters 04, 07 and 09 predict each part.
"""

import math

USABLE = 0.8  # the fraction of the memory for data that grows with the number of parameters
BYTES = {
    "train": 16,  # bf16 weight and gradient, fp32 master weight and Adam's two moments
    "train, SGD": 12,  # SGD with momentum stores one moment less than Adam
    "serve bf16": 2,
    "serve 4-bit": 0.5 + 2 / 64,  # 4 bits per weight, and a 16-bit scale per 64 weights
}


def billions(memory_gb: float, bytes_per_parameter: float, gpus: int = 1) -> float:
    """Return how many billion parameters fit on `gpus` GPUs if everything is sharded."""
    return USABLE * memory_gb * gpus / bytes_per_parameter


def gpus_to_train(parameters_billion: float, memory_gb: float) -> int:
    """Return the smallest number of GPUs that can store 16 bytes of each parameter together."""
    return math.ceil(parameters_billion * BYTES["train"] / (USABLE * memory_gb))


def main() -> None:
    print("largest model, in billions of parameters, on one GPU")
    print(" GB  " + "".join(f"{name:>13}" for name in BYTES))
    for memory in (8, 16, 24, 48, 80, 141):
        print(f"{memory:3}  " + "".join(f"{billions(memory, b):13.1f}" for b in BYTES.values()))
    print("fewest GPUs to train, everything sharded")
    print(" GB  " + "".join(f"{f'{size} B':>13}" for size in (1, 8, 70, 405)))
    for memory in (24, 80, 141):
        needed = [gpus_to_train(size, memory) for size in (1, 8, 70, 405)]
        print(f"{memory:3}  " + "".join(f"{n:13}" for n in needed))
        for size, n in zip((1, 8, 70, 405), needed, strict=True):
            assert billions(memory, 16, n) >= size > billions(memory, 16, n - 1)


if __name__ == "__main__":
    main()
