"""Draws what a hardware fault leads to, and what five ways to continue repeat.

Above: the evidence says what the hardware needs. Below: the job continues in one of five ways,
from slow to fast, and a filled box is work that is done again. The program checks that no way
repeats anything that a slower way does not repeat. Plain Python writes the SVG.
"""

INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
EVIDENCE = ["kernel log: Xid", "ECC, row remapping", "link error rates"]
NEEDS = ["restart the application", "reset the GPU", "reboot the node", "replace the part"]
WORK = ["wait in", "start Python,", "form a", "load", "repeat"]  # two lines each
WORK_2 = ["the queue", "import torch", "group", "state", "steps"]
ALL, ONE, NONE = "all ranks", "one rank", ""
WAYS = {  # what is done again, in the order of WORK; steps are those of the page's programs
    "requeue the job": [ALL, ALL, ALL, "from disk", "since the save"],
    "torchrun restarts": [NONE, ALL, ALL, "from disk", "since the save"],
    "spare, copy in memory": [NONE, NONE, ALL, ONE, "since the copy"],
    "restart in the process": [NONE, NONE, ALL, NONE, "at most one"],
    "smaller group": [NONE, NONE, ALL, NONE, "at most one"],
}


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, dashed=False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"{dash}/>'
    )


def arrow(x1: float, y1: float, x2: float, y2: float, colour: str = MUTED) -> str:
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="1.8" '
        'marker-end="url(#head)"/>'
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 476" '
        'font-family="system-ui, sans-serif"><defs><marker id="head" viewBox="0 0 8 8" '
        'refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{MUTED}"/></marker></defs>'
    ]
    parts += [draw_text(4, 20, "1 What the hardware needs", INK, 15, 'font-weight="600"')]
    for n, words in enumerate(EVIDENCE):
        parts += [box(4, 34 + 44 * n, 176, 34, BLUE), draw_text(14, 56 + 44 * n, words)]
        parts += [arrow(184, 51 + 44 * n, 236, 95)]
    parts += [box(240, 68, 176, 54, MUTED), draw_text(250, 91, "the strictest")]
    parts += [draw_text(250, 110, "action counts")]
    for n, words in enumerate(NEEDS):
        parts += [arrow(420, 95, 480, 45 + 36 * n)]
        parts += [box(484, 30 + 36 * n, 232, 30, ORANGE), draw_text(494, 50 + 36 * n, words)]
    middle = 'text-anchor="middle"'
    parts += [draw_text(4, 204, "2 How the job continues", INK, 15, 'font-weight="600"')]
    for n, (first, second) in enumerate(zip(WORK, WORK_2, strict=True)):
        x = 242 + 106 * n
        parts += [draw_text(x, 226, first, MUTED, 13, middle)]
        parts += [draw_text(x, 242, second, MUTED, 13, middle)]
    for row, (name, cells) in enumerate(WAYS.items()):
        y = 254 + 44 * row
        parts += [draw_text(4, y + 22, name, GREEN if row > 1 else INK)]
        for n, words in enumerate(cells):
            x = 192 + 106 * n
            parts += [box(x, y, 100, 34, ORANGE if words else GREEN, not words)]
            parts += [draw_text(x + 50, y + 22, words or "not repeated", INK, 13, middle)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("recovery_ways.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    slower = {*range(len(WORK))}
    for name, cells in WAYS.items():
        repeated = {n for n, words in enumerate(cells) if words}
        assert repeated <= slower, name
        slower = repeated
        by_all = sum(words == ALL for words in cells)
        print(f"{name:24} repeats {len(repeated)} of {len(WORK)}, {by_all} on all ranks")
    assert [name for name, cells in WAYS.items() if ONE in cells] == ["spare, copy in memory"]


if __name__ == "__main__":
    main()
