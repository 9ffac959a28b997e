"""How large a model fits on a GPU: memory divided by bytes per parameter.

A fifth of the memory is left to activations, the KV cache, buffers and the allocator. That
share is a rule of thumb; chapters 04, 07 and 09 predict each part.
"""

import math

FREE = 0.8  # of the memory, for what grows with the number of parameters
BYTES = {
    "train": 16,  # bf16 weight and gradient, fp32 master weight and Adam's two moments
    "train, SGD": 12,  # with momentum: one moment less
    "serve bf16": 2,
    "serve 4-bit": 0.5 + 2 / 64,  # and a 16-bit scale for every 64 weights
}


def billions(memory_gb: float, bytes_per_parameter: float, gpus: int = 1) -> float:
    """How many billion parameters fit on `gpus` GPUs which shard all of it."""
    return FREE * memory_gb * gpus / bytes_per_parameter


def gpus_to_train(parameters_billion: float, memory_gb: float) -> int:
    """The fewest GPUs which hold 16 bytes of each parameter, sharded."""
    return math.ceil(parameters_billion * BYTES["train"] / (FREE * memory_gb))


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
