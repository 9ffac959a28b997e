"""The path of one micro-batch through V-Half and V-Min, drawn for four ranks.

Each rank has two chunks of layers. A micro-batch goes down the ranks through the first chunks
and comes back up through the second chunks, so that its last forward is on rank 0. Its
gradient takes the same path in the opposite direction. A rank must keep the activations of a
chunk from its forward to its backward. V-Min uses the fastest path. V-Half waits one unit of
time on each rank whenever it goes down the ranks.

The weight gradients W are not drawn, because no other rank waits for them. The begin times are
those from which schedules.py builds the two schedules. Draws v_shaped_paths.svg.
"""

from collections.abc import Callable

import matplotlib
import schedules

matplotlib.use("svg")
import matplotlib.pyplot as plt

P = 4
PALE = schedules.PALE  # of the second chunks
NAMES = "F0", "F1", "B1", "B0"  # the order in which a rank runs them: F or B, and its chunk


def lifetimes(starts: Callable) -> dict[int, list[int]]:
    """For each rank, the units of time from the end of F to the end of B, of both chunks."""
    lives = {}
    for rank in range(P):
        f0, f1, b1, b0 = starts(P, rank)
        lives[rank] = [b0 - f0, b1 - f1]  # every operation lasts one unit
    return lives


def draw(paths: dict[str, Callable]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "paths", "font.size": 12}
    figure, axes = plt.subplots(len(paths), 1, figsize=(7.5, 4.6), sharex=True)
    for axis, (title, starts) in zip(axes, paths.items(), strict=True):
        centres = []
        for rank in range(P):
            begins = starts(P, rank)
            for name, begin in zip(NAMES, begins, strict=True):
                kind, chunk = name[0], int(name[1])
                y, colour = rank + (-0.2, 0.2)[chunk], (schedules.COLOURS, PALE)[chunk][kind]
                axis.barh(y, 1, left=begin, height=0.36, color=colour, zorder=2)
                centres.append((begin + 0.5, y))
                if kind == "F":  # the activations are kept until the backward has ended
                    kept = begins[3 - chunk] - begin
                    axis.barh(y, kept, left=begin + 1, height=0.36, color="#d4d4d8", zorder=0)
        axis.plot(*zip(*sorted(centres), strict=True), ":", color="#3f3f46", zorder=1)
        axis.set_yticks(range(P), [f"rank {rank}" for rank in range(P)])
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=12)
        axis.spines[["top", "right"]].set_visible(False)
    colours = schedules.COLOURS["F"], PALE["F"], schedules.COLOURS["B"], PALE["B"], "#d4d4d8"
    words = (
        "F, first chunk", "F, second chunk", "B, first chunk", "B, second chunk",
        "activations are kept",
    )  # fmt: skip
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours]
    axes[1].legend(patches, words, loc="upper right", frameon=False, fontsize=11)
    axes[-1].set_xlabel("time, in units of one chunk's forward")
    figure.tight_layout()
    figure.savefig("v_shaped_paths.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    paths = {}
    for name, starts, last in (
        ("V-Half", schedules.v_half_starts, 6 * P + 2),
        ("V-Min", schedules.v_min_starts, 4 * P),
    ):
        order = [begin for k in range(4) for begin in sorted(starts(P, r)[k] for r in range(P))]
        assert order == sorted(order)  # down, up, down, up: no rank runs before its input
        assert max(starts(P, r)[3] + 1 for r in range(P)) == last
        lives = lifetimes(starts)
        (total,) = {sum(both) for both in lives.values()}  # the same on every rank
        paths[f"{name}: a rank keeps its two chunks for {total} units together"] = starts
        each = ", ".join(f"{first} + {second}" for first, second in lives.values())
        print(f"{name:6}  units from F to B of both chunks, rank 0 to {P - 1}: {each}")
    draw(paths)


if __name__ == "__main__":
    main()
