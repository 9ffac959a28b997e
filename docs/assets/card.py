"""Draw docs/assets/card.png, the picture that goes with a link to the book.

    python docs/assets/card.py

The ring of ranks is the book's mark: each rank passes a chunk to the next.
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Arc, Circle, FancyBboxPatch

CARD = Path(__file__).with_name("card.png")
PAPER, INK, SOFT, BLUE, ORANGE = "#14191f", "#eef2f5", "#a3afba", "#74c3e8", "#f2a873"


def draw(path: Path = CARD) -> None:
    figure = plt.figure(figsize=(12, 6.3), dpi=100, facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 1200), ylim=(0, 630))
    axes.axis("off")

    x, y, radius = 930, 315, 170
    for rank in range(4):
        angle = 90 * rank
        arc = Arc((x, y), 2 * radius, 2 * radius, angle=angle, theta1=19, theta2=71)
        arc.set(color=BLUE, linewidth=10)
        axes.add_patch(arc)
        at = (x + radius * math.cos(math.radians(90 - angle)),
              y + radius * math.sin(math.radians(90 - angle)))  # fmt: skip
        axes.add_patch(Circle(at, 44, color=BLUE))
        axes.text(
            *at, str(rank), color=PAPER, fontsize=28, weight="bold", ha="center", va="center"
        )
    axes.add_patch(
        FancyBboxPatch(
            (x - 34, y - 34), 68, 68, boxstyle="round,pad=0,rounding_size=8", color=ORANGE
        )
    )

    axes.text(80, 372, "World Size", color=INK, fontsize=66, weight="bold")
    for line, text in enumerate(
        ("A book you can run,", "on GPU computing and", "distributed training")
    ):
        axes.text(84, 284 - 44 * line, text, color=SOFT, fontsize=23)
    figure.savefig(path, facecolor=PAPER, metadata={"Software": None})


if __name__ == "__main__":
    draw()
