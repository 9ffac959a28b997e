"""Draw docs/assets/home.svg, the picture of the home page: an all-reduce around a ring of four.

    python docs/assets/home.py

It shows the middle, where each rank has one finished sum. Under the address home.svg#play it
plays once from the beginning, unless the reader wants no motion; docs/assets/book.js asks for
that when it comes into view.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "snippets" / "01_parallelism_strategies"))
from collective_steps import plan, play  # noqa: E402

RANKS, MIDDLE = 4, 3
COLOURS = ["#0b6e99", "#c2410c", "#15803d", "#7c3aed"]
PITCH, ROW, CELL, LEFT, TOP = 68, 26, 56, 16, 62
STYLE = """
text { font: 15px system-ui, sans-serif; fill: #1c242c; text-anchor: middle }
path { fill: none; stroke: #0b6e99; stroke-width: 1.5 }
.s, .m { opacity: 0 }
.s.now { opacity: 1 }
@media (prefers-reduced-motion: no-preference) {
  #play:target .s { opacity: 0; animation: show 1ms linear var(--at) forwards }
  #play:target .m { animation: fly 1s ease-in-out var(--at) forwards }
}
@keyframes show { to { opacity: 1 } }
@keyframes fly {
  0%, 99% { opacity: 1 }
  99% { transform: translate(var(--by)) }
  100% { opacity: 0; transform: translate(var(--by)) }
}
"""


def draw() -> str:
    steps = plan("all-reduce", "ring", RANKS, RANKS)
    states = play("all-reduce", RANKS, steps)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * LEFT + 4 * PITCH} 194">']
    out += [f"<style>{STYLE}</style>", "<defs>"]
    masks = sorted({tuple(sorted(held[c])) for state in states for held in state for c in held})
    for mask in masks:
        wide = CELL / len(mask)
        stripes = "".join(
            f'<rect x="{i * wide:g}" width="{wide:g}" height="{ROW - 3}" fill="{COLOURS[r]}"/>'
            for i, r in enumerate(mask)
        )
        out.append(f'<g id="m{"".join(map(str, mask))}">{stripes}</g>')
    out.append('</defs><g id="play">')

    def chunk(kind: str, rank: int, c: int, mask: frozenset[int], style: str) -> None:
        name = "m" + "".join(map(str, sorted(mask)))
        x, y = LEFT + 6 + rank * PITCH, TOP + c * ROW
        out.append(f'<use href="#{name}" x="{x}" y="{y}" class="{kind}" style="{style}"/>')

    for rank in range(RANKS):
        middle = LEFT + PITCH * (rank + 0.5)
        out.append(f'<text x="{middle:g}" y="{TOP - 8}">rank {rank}</text>')
        to, high = (rank + 1) % RANKS, 26 if rank + 1 < RANKS else 2
        end = LEFT + PITCH * (to + 0.5)
        near, off = (middle + 4, end - 4) if to else (middle - 4, end + 4)
        arc, head = f"C{near:g} {high} {off:g} {high} {off:g} {TOP - 22}", "l-4 -5m4 5l4 -5"
        out.append(f'<path d="M{near:g} {TOP - 22}{arc}{head}"/>')
        for c in range(RANKS):
            held = [state[rank][c] for state in states]
            last = max(k for k in range(MIDDLE + 1) if k == 0 or held[k] != held[k - 1])
            for k, mask in enumerate(held):
                if k == 0 or mask != held[k - 1]:
                    kind = "s now" if k == last else "s"
                    chunk(kind, rank, c, mask, f"--at:{k + 0.6 * (k > 0):g}s")
    for k, step in enumerate(steps):
        for rank, to, chunks, _ in step:
            for c in chunks:
                by = (to - rank) * PITCH
                chunk("m", rank, c, states[k][rank][c], f"--at:{k + 0.6:g}s;--by:{by}px")
    out.append(f'<text x="{LEFT + 2 * PITCH}" y="186">all-reduce around a ring</text>')
    return "\n".join([*out, "</g>", "</svg>", ""])


if __name__ == "__main__":
    Path(__file__).with_name("home.svg").write_text(draw(), "utf-8")
