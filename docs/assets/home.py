"""Draw docs/assets/home.svg, the animation of the home page: an all-reduce around a ring.

    python docs/assets/home.py

The plan, the state after each step and the bytes sent come from the program
snippets/01_parallelism_strategies/collective_steps.py. The site puts the drawing into the page,
so that it uses the colours of the page and so that a reader can pause it. Without animation,
for example on paper or when the reader prefers reduced motion, it shows the middle of the
all-reduce: each rank has the finished sum of one chunk.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "snippets" / "01_parallelism_strategies"))
from collective_steps import bytes_sent, plan, play  # noqa: E402

RANKS, SIZE = 4, 12 * 2**20  # bytes of the tensor
MIDDLE = 3  # how many steps are complete in the drawing without animation
PLACES = [(0, 0), (320, 0), (320, 216), (0, 216)]  # of the ranks' boxes, clockwise
BOX, CHUNK, ROW, FIRST_ROW = (160, 150), (136, 23), 28, 33
COLOURS = ["#0b6e99", "#b8430f", "#15803d", "#7c3aed"]
START, STEP, END = 2.0, 2.4, 4.0  # seconds
FLIGHT = (0.5, 2.0)  # begin and end of the messages, in seconds since the start of a step
STYLE = """
.ring text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  text-anchor: middle; fill: #1d252d }
.ring .rank { font-size: 17px; font-weight: 600 }
.ring .phase { font-size: 20px; font-weight: 700 }
.ring .small { font-size: 15px; fill: #4d5965 }
.ring .scatter { fill: #0a5f85 }
.ring .gather { fill: #a63a08 }
.ring .box { fill: #f5f7f9; stroke: #dde2e7; stroke-width: 1.5 }
.ring .link { fill: none; stroke: #4d5965; stroke-width: 2 }
.ring .sent { fill: none; stroke: #1d252d; stroke-width: 2 }
.ring .still, .ring .moving { opacity: 0 }
.ring .middle { opacity: 1 }
@media screen {
  .ring text { fill: var(--ink, #1d252d) }
  .ring .small { fill: var(--ink-soft, #4d5965) }
  .ring .scatter { fill: var(--blue, #0a5f85) }
  .ring .gather { fill: var(--orange, #a63a08) }
  .ring .box { fill: var(--paper-code, #f5f7f9); stroke: var(--rule, #dde2e7) }
  .ring .link { stroke: var(--ink-soft, #4d5965) }
  .ring .sent { stroke: var(--ink, #1d252d) }
}
@media screen and (prefers-reduced-motion: no-preference) {
  .ring .still, .ring .moving { opacity: 0; animation: SECONDSs linear infinite }
  .ring .all { animation: ring-all SECONDSs linear infinite }
}
@keyframes ring-all { 0%, 100% { opacity: 0 } 2%, 98% { opacity: 1 } }
"""
# Its own style: the rules above do not reach a drawing that is used several times.
SUM = "fill: #fff; font: 600 14px system-ui, sans-serif; text-anchor: middle"


def percent(seconds: float) -> str:
    return f"{100 * seconds / length():.2f}".rstrip("0").rstrip(".") + "%"


def length() -> float:
    """Seconds until the animation starts again."""
    return START + STEP * len(plan("all-reduce", "ring", RANKS, RANKS)) + END


def begins(step: int) -> float:
    """Seconds at which a step begins; for the number of steps, at which the last one ends."""
    return START + STEP * step


def shown(name: str, begin: float, end: float) -> str:
    """The keyframes of a drawing that is visible from one moment to another, and only then."""
    before = f"0%, {percent(begin - 0.01)} {{ opacity: 0 }} {percent(begin)}" if begin else "0%"
    after = f" {percent(end + 0.01)}, 100% {{ opacity: 0 }}" if end < length() else ""
    return f"@keyframes {name} {{ {before}, {percent(end)} {{ opacity: 1 }}{after} }}"


def moved(name: str, step: int, by: tuple[int, int]) -> str:
    """The keyframes of a message: it appears at its sender, moves, arrives and disappears."""
    first, last = (begins(step) + each for each in FLIGHT)
    there = f"translate({by[0]}px, {by[1]}px)"
    return (
        f"@keyframes {name} {{ 0%, {percent(begins(step) - 0.01)} {{ opacity: 0 }} "
        f"{percent(begins(step))} {{ opacity: 1 }} "
        f"{percent(first)} {{ opacity: 1; transform: none; "
        f"animation-timing-function: ease-in-out }} "
        f"{percent(last)} {{ opacity: 1; transform: {there} }} "
        f"{percent(last + 0.01)}, 100% {{ opacity: 0; transform: {there} }} }}"
    )


def name_of(mask: frozenset[int]) -> str:
    return "ring-" + "".join(map(str, sorted(mask)))


def stripes(mask: frozenset[int]) -> str:
    """A chunk: a stripe for each rank whose data is in it, and a word if it is complete."""
    width, height = CHUNK
    wide = width / len(mask)
    drawn = "".join(
        f'<rect x="{i * wide:g}" width="{wide:g}" height="{height}" fill="{COLOURS[rank]}"/>'
        for i, rank in enumerate(sorted(mask))
    )
    if len(mask) == RANKS:
        drawn += f'<text x="{width / 2:g}" y="16" style="{SUM}">sum</text>'
    return f'<g id="{name_of(mask)}">{drawn}</g>'


def draw() -> str:
    steps = plan("all-reduce", "ring", RANKS, RANKS)
    states = play("all-reduce", RANKS, steps)
    sent = [max(bytes_sent(steps[:k], RANKS, SIZE)) / 2**20 for k in range(len(steps) + 1)]
    frames: dict[str, str] = {}
    parts: list[str] = []

    def spot(rank: int, c: int) -> tuple[int, int]:
        x, y = PLACES[rank]
        return x + (BOX[0] - CHUNK[0]) // 2, y + FIRST_ROW + c * ROW

    for rank, (x, y) in enumerate(PLACES):
        parts.append(
            f'<rect class="box" x="{x + 1}" y="{y + 1}" width="{BOX[0] - 2}" '
            f'height="{BOX[1] - 2}" rx="8"/>'
            f'<text class="rank" x="{x + BOX[0] // 2}" y="{y + 22}">rank {rank}</text>'
        )
    right, low = PLACES[2]
    for way in (  # from each rank to the next, clockwise
        f"M{BOX[0] + 8} 75H{right - 10}m-8 -6l8 6l-8 6",
        f"M{right + BOX[0] // 2} {BOX[1] + 8}V{low - 8}m-6 -8l6 8l6 -8",
        f"M{right - 8} {low + 75}H{BOX[0] + 10}m8 -6l-8 6l8 6",
        f"M{BOX[0] // 2} {low - 8}V{BOX[1] + 8}m-6 8l6 -8l6 8",
    ):
        parts.append(f'<path class="link" d="{way}"/>')

    # what each rank has: a drawing for each time at which it changes
    ends = [begins(k) + FLIGHT[1] for k in range(len(steps))]
    for rank in range(RANKS):
        for c in range(RANKS):
            x, y = spot(rank, c)
            changes = [0] + [
                k for k in range(1, len(states)) if states[k][rank][c] != states[k - 1][rank][c]
            ]
            for k, after in zip(changes, [*changes[1:], len(states)], strict=True):
                name = f"ring-{k}-{after}"
                begin = ends[k - 1] if k else 0.0
                end = ends[after - 1] if after < len(states) else length()
                frames[name] = shown(name, begin, end)
                kind = "still middle" if k <= MIDDLE < after else "still"
                parts.append(
                    f'<use href="#{name_of(states[k][rank][c])}" x="{x}" y="{y}" '
                    f'class="{kind}" style="animation-name:{name}"/>'
                )
    # what moves in each step
    for k, step in enumerate(steps):
        for rank, to, chunks, _ in step:
            by = (PLACES[to][0] - PLACES[rank][0], PLACES[to][1] - PLACES[rank][1])
            name = f"ring-{k}-from-{rank}"
            frames[name] = moved(name, k, by)
            for c in chunks:
                x, y = spot(rank, c)
                parts.append(
                    f'<g class="moving" style="animation-name:{name}">'
                    f'<use href="#{name_of(states[k][rank][c])}" x="{x}" y="{y}"/>'
                    f'<rect class="sent" x="{x}" y="{y}" width="{CHUNK[0]}" '
                    f'height="{CHUNK[1]}"/></g>'
                )
    # what the middle says: the phase and the step, and under them what a rank has sent so far
    half, middle = len(steps) // 2, (right + BOX[0]) // 2
    done = len(steps)

    def say(name: str, begin: float, end: float, static: bool, lines: list) -> None:
        frames[name] = shown(name, begin, end)
        said = "".join(f'<text class="{kind}" x="{middle}" y="{y}">{words}</text>'
                       for kind, y, words in lines)  # fmt: skip
        kind = "still middle" if static else "still"
        parts.append(f'<g class="{kind}" style="animation-name:{name}">{said}</g>')

    first = [("phase", 172, "all-reduce"), ("small", 192, "each rank has")]
    say("ring-starts", 0, START, False, [*first, ("small", 211, "a tensor of its own")])
    for k in range(done):
        kind, phase = ("scatter", "reduce-scatter") if k < half else ("gather", "all-gather")
        lines = [
            (f"phase {kind}", 172, phase),
            ("small", 192, f"step {k % half + 1} of {half}"),
        ]
        say(f"ring-step-{k}", begins(k), begins(k + 1), k + 1 == MIDDLE, lines)
    for k in range(done):
        begin, end = (ends[k - 1] if k else START), ends[k]
        say(f"ring-sent-{k}", begin, end, k == MIDDLE,
            [("small", 211, f"each rank sent {sent[k]:g} MiB")])  # fmt: skip
    say(f"ring-sent-{done}", ends[-1], length(), False,
        [("small", 211, f"each rank sent {sent[-1]:g} MiB")])  # fmt: skip
    last = [("phase", 172, "all-reduce"), ("small", 192, f"of {SIZE / 2**20:g} MiB is done")]
    say("ring-ends", begins(done), length(), False, last)

    masks = {mask for state in states for held in state for mask in held.values()}
    defined = [stripes(mask) for mask in sorted(masks, key=sorted)]
    style = STYLE.replace("SECONDS", f"{length():g}")
    wide, high = right + BOX[0], low + BOX[1]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
            'class="ring">',
            f"<style>{style}",
            *frames.values(),
            "</style>",
            "<defs>",
            *defined,
            '</defs><g class="all">',
            *parts,
            "</g>",
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("home.svg").write_text(draw(), "utf-8")
