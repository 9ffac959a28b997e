"""Which stage fits: the model state per rank for each stage, six models and three clusters.

The program prints the model state per rank, in GB, for GPUs with 80 GB. It reserves 24 GB for
activations and buffers. The last column is the lowest stage whose state fits into the
remaining 56 GB, because in one dtype a lower stage never has to send more than a higher one.
Look at the row of 13B: with 8 ranks the answer is a different stage than with 64 ranks.

The table is for bf16 gradients. An fp32 gradient needs 4 bytes instead of 2.
"""

import math

MEMORY, RESERVED = 80.0, 24.0  # GB of a GPU, and the part for activations and buffers
MODELS = (1, 3, 8, 13, 70, 405)  # 10⁹ parameters
RANKS = (8, 64, 512)
STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def state(billions: float, n: int, stage: int) -> float:
    """Return the GB of model state per rank, for Adam in mixed precision."""
    # parameters are divided from stage 3 on, gradients from stage 2, the optimizer from stage 1
    divisors = [n if stage >= first else 1 for first in (3, 2, 1)]
    return sum(size * billions / by for size, by in zip((2, 2, 12), divisors, strict=True))


def lowest_stage(sizes: list[float]) -> str:
    """Return the name of the first stage whose state fits, or "more" GPUs."""
    fitting = [name for name, size in zip(STAGES, sizes, strict=True) if fits(size)]
    return fitting[0] if fitting else "more"


def fits(size: float) -> bool:
    return size <= MEMORY - RESERVED


def count_elements(n: int, stage: int) -> float:
    """Return the bytes per parameter on the fullest rank, by assigning tensors to ranks.

    This is the reference for `state`. It goes through a small model of 10 · n parameters and
    adds the tensors of every parameter one by one: bf16 parameter and gradient, and in fp32
    the master weight and two moments.
    """
    totals = [0] * n
    for element in range(10 * n):
        owner = element // 10
        for tensor in ("parameter", "gradient", "master", "moment 1", "moment 2"):
            sharded = {"parameter": stage == 3, "gradient": stage in (2, 3)}
            everywhere = not sharded.get(tensor, stage > 0)
            for rank in range(n):
                if everywhere or rank == owner:
                    totals[rank] += 2 if tensor in sharded else 4
    return max(totals) / (10 * n)


def main() -> None:
    print("GB of model state per rank. The last column is the lowest stage that fits.")
    print(f"* fits into {MEMORY - RESERVED:.0f} GB: of {MEMORY:.0f} GB,", end=" ")
    print(f"{RESERVED:.0f} GB are reserved for activations and buffers")
    print("  Ψ     N       DDP   ZeRO-1   ZeRO-2   ZeRO-3  take")
    for n in (1, 3, 8):
        for stage in range(4):
            assert math.isclose(state(1, n, stage), count_elements(n, stage))
    for billions in MODELS:
        for n in RANKS:
            sizes = [state(billions, n, stage) for stage in range(4)]
            take = lowest_stage(sizes)
            # the largest model of each stage, in 10⁹ parameters, from the formulas of the page
            largest = [(MEMORY - RESERVED) / b for b in (16, 4 + 12 / n, 2 + 14 / n, 16 / n)]
            assert take == [*STAGES, "more"][sum(billions > limit for limit in largest)]
            cells = [f"{size:7.1f}{'*' if fits(size) else ' '}" for size in sizes]
            print(f"{billions:3}B  {n:4}  " + " ".join(cells) + f"  {take}")


if __name__ == "__main__":
    main()
