"""Which part of the 16 bytes each of four ranks keeps, under DDP and the three stages of ZeRO.

A column is a rank, its height the 16 bytes per parameter of mixed-precision Adam, cut into
quarters by parameter. Filled is what the rank keeps. Draws who_keeps_what.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

N = 4
PARTS = {  # bytes per parameter, the first stage that shards it, colour
    "parameters": (2, 3, "#0b6e99"),
    "gradients": (2, 2, "#c2410c"),
    "optimizer": (12, 1, "#7c3aed"),
}


def kept(stage: int, rank: int) -> dict[str, list[bool]]:
    """For each kind, which of the N shards rank `rank` keeps."""
    return {
        kind: [stage < shards_from or shard == rank for shard in range(N)]
        for kind, (_, shards_from, _) in PARTS.items()
    }


def bytes_kept(stage: int, rank: int) -> float:
    """Per parameter of the model."""
    return sum(PARTS[kind][0] * sum(mine) / N for kind, mine in kept(stage, rank).items())


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "keeps", "font.size": 12}
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for stage in range(4):
        left = stage * (N + 1)
        for rank in range(N):
            bottom = 0.0
            for kind, mine in kept(stage, rank).items():
                size, _, colour = PARTS[kind]
                for shard in range(N):
                    height = size / N
                    colours = {"facecolor": colour if mine[shard] else "none"}
                    axis.bar(
                        left + rank, height, 0.92, bottom, edgecolor=colour, lw=0.5, **colours
                    )
                    bottom += height
        name = "DDP" if stage == 0 else f"ZeRO-{stage}"
        axis.text(
            left + 1.5, 16.4, f"{name}: {bytes_kept(stage, 0):g}Ψ", ha="center", color="#52525b"
        )
    for kind, y in (("parameters", 1), ("gradients", 3), ("optimizer", 10)):
        axis.text(-0.8, y, kind, ha="right", va="center", color=PARTS[kind][2])
    places = [stage * (N + 1) + rank for stage in range(4) for rank in range(N)]
    axis.set_xticks(places, [str(rank) for _ in range(4) for rank in range(N)])
    axis.tick_params(axis="both", length=0)
    axis.set_yticks([])
    axis.set_xlabel("rank")
    axis.spines[:].set_visible(False)
    axis.margins(x=0.01)
    figure.tight_layout()
    figure.savefig("who_keeps_what.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    formulas = (16, 4 + 12 / N, 2 + 14 / N, 16 / N)
    assert all(kept(2, 0)["parameters"]) and not all(kept(2, 0)["gradients"])
    for stage, formula in enumerate(formulas):
        for rank in range(N):
            assert bytes_kept(stage, rank) == formula
        for kind in PARTS:  # nothing is lost: some rank keeps each shard
            owners = zip(*(kept(stage, rank)[kind] for rank in range(N)), strict=True)
            assert all(any(shard) for shard in owners)
        copies = sum(bytes_kept(stage, rank) for rank in range(N)) / 16
        print(f"stage {stage}: {formula:4g} bytes per parameter, {copies:g} copies in all")
    draw()


if __name__ == "__main__":
    main()
