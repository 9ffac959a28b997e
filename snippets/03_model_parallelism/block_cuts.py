"""A picture of what tensor and sequence parallelism cut in a transformer block.

A list says for each part of the block how it is cut under TP, and how under TP with SP. The
picture and the printed numbers come from this list. Draws block_cuts.svg.
"""

from collections import Counter

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.colors import to_hex
from matplotlib.patches import FancyBboxPatch, Rectangle

RANKS = 4
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK = "#52525b"
# part, its cut under TP and under TP + SP; at `|` a region of cut matrices begins or ends
PARTS = [
    ("layer norm", "whole", "tokens"),
    ("|", "f", "g"),
    ("Q, K, V", "columns", "columns"),
    ("attention", "heads", "heads"),
    ("output", "rows", "rows"),
    ("|", "g", "ḡ"),
    ("dropout, sum", "whole", "tokens"),
    ("layer norm", "whole", "tokens"),
    ("|", "f", "g"),
    ("up, GeLU", "columns", "columns"),
    ("down", "rows", "rows"),
    ("|", "g", "ḡ"),
    ("dropout, sum", "whole", "tokens"),
]
SENT = {  # forward / backward
    ("f", "TP"): "nothing / all-reduce",
    ("g", "TP"): "all-reduce / nothing",
    ("g", "SP"): "all-gather / reduce-scatter",
    ("ḡ", "SP"): "reduce-scatter / all-gather",
}


def draw_part(axes, x: float, y: float, held: str) -> None:
    """Draw the parts of the four ranks in colours, or grey if every rank has the whole."""
    width, height = 2.2, 0.72
    if held == "whole":
        axes.add_patch(Rectangle((x, y), width, height, facecolor=INK, alpha=0.22))
    for rank in range(RANKS if held != "whole" else 0):
        if held in ("columns", "heads"):  # side by side
            box = (x + rank * width / RANKS, y), width / RANKS - 0.05, height
        else:  # one above the other: rows of a matrix, stretches of tokens
            box = (x, y + (RANKS - 1 - rank) * height / RANKS), width, height / RANKS - 0.04
        axes.add_patch(Rectangle(*box, facecolor=COLOURS[rank], alpha=0.85))


def check_colours(axes) -> None:
    """Every cut part has one stripe of each rank, and only a whole part is grey."""
    stripes = Counter(to_hex(patch.get_facecolor()) for patch in axes.patches)
    held = Counter(cut for name, *cuts in PARTS if name != "|" for cut in cuts)
    whole = held.pop("whole")
    assert [stripes[colour] for colour in (INK, *COLOURS)] == [whole] + RANKS * [held.total()]


def main() -> None:
    for kind, enter, leave in (("TP", "f", "g"), ("SP", "g", "ḡ")):  # each other's backward
        assert SENT[enter, kind].split(" / ") == SENT[leave, kind].split(" / ")[::-1]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "block", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7.5, 7.2))
    columns = {"TP": 1.9, "SP": 7.2}
    grey = Rectangle((0, 0), 1, 1, facecolor=INK, alpha=0.22)
    patches = [grey, *(Rectangle((0, 0), 1, 1, facecolor=c, alpha=0.85) for c in COLOURS)]
    labels = ["whole on every rank", *(f"rank {rank}" for rank in range(RANKS))]
    axes.legend(patches, labels, ncols=5, loc="upper center", frameon=False, fontsize=10,
                columnspacing=1.2, handlelength=1.4)  # fmt: skip
    for kind, x in columns.items():
        title = {"TP": "TP", "SP": "TP + SP"}[kind]
        axes.text(x + 1.1, 0.3, title, ha="center", weight="bold", color=INK)
    y = 0.0
    for name, under_tp, under_sp in PARTS:
        if name == "|":
            y -= 0.62
            for kind, held in (("TP", under_tp), ("SP", under_sp)):
                x = columns[kind]
                badge = FancyBboxPatch(
                    (x + 0.85, y + 0.05), 0.5, 0.4, boxstyle="round,pad=0.06"
                )
                badge.set(facecolor="none", edgecolor=INK)
                axes.add_patch(badge)
                axes.text(x + 1.1, y + 0.25, held, ha="center", va="center", color=INK)
                forward, backward = SENT[held, kind].split(" / ")
                sent = f"forward: {forward}\nbackward: {backward}"
                axes.text(x + 2.35, y + 0.25, sent, va="center", color=INK, fontsize=10)
            y -= 0.12
            continue
        y -= 0.86
        axes.text(1.7, y + 0.36, name, ha="right", va="center", color=INK)
        draw_part(axes, columns["TP"], y, under_tp)
        draw_part(axes, columns["SP"], y, under_sp)
    axes.set_xlim(-0.7, 12.9)
    axes.set_ylim(y - 0.2, 1.6)
    axes.axis("off")
    check_colours(axes)
    figure.tight_layout(pad=0.2)
    figure.savefig("block_cuts.svg", transparent=True, metadata={"Date": None})

    for column, kind in ((1, "TP"), (2, "TP + SP")):
        held = [part[column] for part in PARTS if part[0] != "|"]
        borders = sum(part[0] == "|" for part in PARTS)
        print(f"{kind:7}  {len(held)} parts, {held.count('whole')} whole on every rank", end="")
        print(f", {borders} borders that send")


if __name__ == "__main__":
    main()
