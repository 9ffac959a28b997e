"""What tensor and sequence parallelism cut in a transformer block, drawn from a list.

Each part says how TP and how TP with SP hold it; the picture and the printed count come from
that list. Draws block_cuts.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

RANKS = 4
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
INK = "#52525b"
# part: (held under TP, held under TP + SP); `|` marks where a cut region begins or ends
PARTS = [
    ("norm", "whole", "tokens"),
    ("|", "f", "g"),
    ("Q K V", "columns", "columns"),
    ("attention", "heads", "heads"),
    ("O", "rows", "rows"),
    ("|", "g", "ḡ"),
    ("dropout, +", "whole", "tokens"),
    ("norm", "whole", "tokens"),
    ("|", "f", "g"),
    ("up, GeLU", "columns", "columns"),
    ("down", "rows", "rows"),
    ("|", "g", "ḡ"),
    ("dropout, +", "whole", "tokens"),
]
SENT = {  # forward / backward
    ("f", "TP"): "– / all-reduce",
    ("g", "TP"): "all-reduce / –",
    ("g", "SP"): "gather / reduce-scatter",
    ("ḡ", "SP"): "reduce-scatter / gather",
}


def draw_part(axes, x: float, y: float, held: str) -> None:
    """Four ranks' shares: stripes of colour, or grey where every rank has all of it."""
    width, height = 2.2, 0.72
    if held == "whole":
        axes.add_patch(Rectangle((x, y), width, height, facecolor=INK, alpha=0.22))
    for rank in range(RANKS if held != "whole" else 0):
        if held in ("columns", "heads"):  # side by side
            box = (x + rank * width / RANKS, y), width / RANKS - 0.05, height
        else:  # one above the other: rows of a matrix, stretches of tokens
            box = (x, y + (RANKS - 1 - rank) * height / RANKS), width, height / RANKS - 0.04
        axes.add_patch(Rectangle(*box, facecolor=COLOURS[rank], alpha=0.85))


def main() -> None:
    for kind, enter, leave in (("TP", "f", "g"), ("SP", "g", "ḡ")):  # each other's backward
        assert SENT[enter, kind].split(" / ") == SENT[leave, kind].split(" / ")[::-1]
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "block", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 7.2))
    columns = {"TP": 1.9, "SP": 6.9}
    for title, x in (("TP", columns["TP"]), ("TP + SP", columns["SP"])):
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
                sent = SENT[held, kind].replace(" / ", "\n")
                axes.text(x + 2.35, y + 0.25, sent, va="center", color=INK, fontsize=10)
            y -= 0.12
            continue
        y -= 0.86
        axes.text(1.7, y + 0.36, name, ha="right", va="center", color=INK)
        draw_part(axes, columns["TP"], y, under_tp)
        draw_part(axes, columns["SP"], y, under_sp)
    key = "grey: all of it on every rank; colours: ranks 0 to 3"
    axes.text(5.1, y - 0.6, key, ha="center", color=INK)
    key = "beside a border: what it sends forward, and below, backward"
    axes.text(5.1, y - 1.15, key, ha="center", color=INK)
    axes.set_xlim(-0.5, 11.2)
    axes.set_ylim(y - 1.5, 0.7)
    axes.axis("off")
    figure.tight_layout(pad=0.2)
    figure.savefig("block_cuts.svg", transparent=True, metadata={"Date": None})

    for column, kind in ((1, "TP"), (2, "TP + SP")):
        held = [part[column] for part in PARTS if part[0] != "|"]
        borders = sum(part[0] == "|" for part in PARTS)
        print(f"{kind:7}  {len(held)} parts, {held.count('whole')} whole on every rank", end="")
        print(f", {borders} borders that send")


if __name__ == "__main__":
    main()
