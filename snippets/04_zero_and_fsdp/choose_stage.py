"""Which stage fits: model state per rank by stage, for models and numbers of 80 GB GPUs.

The least stage that leaves room for activations and buffers is the one to take, since 1 and 2
send what DDP sends, and 3 sends half as much again.
"""

MEMORY, ROOM = 80.0, 24.0  # GB of the GPU, and what is kept free of model state
MODELS = (1, 3, 8, 13, 70, 405)  # 10⁹ parameters
RANKS = (8, 64, 512)


def state(billions: float, n: int, stage: int) -> float:
    """GB of model state per rank, mixed-precision Adam."""
    cut = [n if stage >= level else 1 for level in (3, 2, 1)]
    return sum(size * billions / by for size, by in zip((2, 2, 12), cut, strict=True))


def main() -> None:
    print(f"GB of model state per rank; * fits into {MEMORY - ROOM:.0f} of {MEMORY:.0f} GB")
    print("  Ψ     N       DDP   ZeRO-1   ZeRO-2   ZeRO-3  take")
    for billions in MODELS:
        for n in RANKS:
            sizes = [state(billions, n, stage) for stage in range(4)]
            fits = [size <= MEMORY - ROOM for size in sizes]
            assert sizes == sorted(sizes, reverse=True) and sizes[3] == 16 * billions / n
            cells = [f"{s:7.1f}{'*' if f else ' '}" for s, f in zip(sizes, fits, strict=True)]
            take = (
                ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"][fits.index(True)] if any(fits) else "more"
            )
            print(f"{billions:3}B  {n:4}  " + " ".join(cells) + f"  {take}")


if __name__ == "__main__":
    main()
