"""A picture of the 16 bytes per parameter: which of four ranks keeps which part of them.

The program draws DDP and the three stages of ZeRO in who_keeps_what.svg. Each column is a rank,
and its height is the 16 bytes per parameter of Adam in mixed precision. Each kind of state is
cut into four shards, and the shards that the rank keeps are filled.

The output adds up what all four ranks keep. DDP keeps four copies of everything, and ZeRO-3
keeps exactly one.
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


def shards_on_rank(stage: int, rank: int) -> dict[str, list[bool]]:
    """Return, for each kind of state, which of the N shards this rank keeps."""
    return {
        kind: [stage < first_stage or shard == rank for shard in range(N)]
        for kind, (_, first_stage, _) in PARTS.items()
    }


def bytes_kept(stage: int, rank: int) -> float:
    """Return the bytes that this rank keeps, per parameter of the model."""
    shards = shards_on_rank(stage, rank)
    return sum(PARTS[kind][0] * sum(mine) / N for kind, mine in shards.items())


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "keeps", "font.size": 12}
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for stage in range(4):
        left = stage * (N + 1)
        for rank in range(N):
            bottom = 0.0
            for kind, mine in shards_on_rank(stage, rank).items():
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
    bottom = 0.0
    for kind, (size, _, colour) in PARTS.items():
        axis.text(-0.8, bottom + size / 2, kind, ha="right", va="center", color=colour)
        bottom += size
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
    # stage 1 shards the optimizer, stage 2 also the gradients, stage 3 also the parameters
    sharded = [(), ("optimizer",), ("gradients", "optimizer"), tuple(PARTS)]
    for stage, formula in enumerate(formulas):
        for rank in range(N):
            assert bytes_kept(stage, rank) == formula
        for kind in PARTS:  # no shard is lost, and a sharded kind has no second copy
            by_rank = [shards_on_rank(stage, rank)[kind] for rank in range(N)]
            owners = [sum(shard) for shard in zip(*by_rank, strict=True)]
            assert owners == [1 if kind in sharded[stage] else N] * N
        copies = sum(bytes_kept(stage, rank) for rank in range(N)) / 16
        name = "DDP" if stage == 0 else f"ZeRO-{stage}"
        print(
            f"{name:6}: {formula:4g} bytes per parameter on a rank, copies in all: {copies:g}"
        )
    draw()


if __name__ == "__main__":
    main()
