"""A scheduler that changes between warps hides the latency of memory, as Little's law says.

Each warp repeats three things: it issues a load, waits for the data, and computes with them.
The scheduler issues one instruction per clock, for any warp that does not wait. With one warp
the scheduler is idle most of the time. Look at the column `busy`: it grows in proportion to the
number of warps, until the scheduler always has something to issue.

The program counts the loads in flight clock by clock and compares them with Little's law. It
draws latency_hiding.svg. Plain Python writes the SVG, so the program needs no package.
"""

from dataclasses import dataclass, field

LATENCY, COMPUTE = 16, 4  # clocks that a load takes, and instructions that use its result
WIDTH, CELL = 720, 9.5
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


@dataclass
class Run:
    """What the scheduler issued: a letter for each clock of each warp."""

    rows: list[list[str]]  # L: the load is issued, C: computes, w: waits for the load, .: ready
    loads: int = 0  # that were issued
    in_flight: list[int] = field(default_factory=list)  # loads under way, for each clock


# --8<-- [start:schedule]
def schedule(warps: int, clocks: int) -> Run:
    """Issue one instruction per clock, for the same warp until it has to wait for its load."""
    run = Run([[] for _ in range(warps)])
    arrives = [0] * warps  # the clock at which the load of the warp has arrived
    left = [0] * warps  # instructions until the next load
    current = 0
    for now in range(clocks):
        turns = [(current + k) % warps for k in range(warps)]
        ready = [warp for warp in turns if arrives[warp] <= now]
        current = ready[0] if ready else current
        for warp in range(warps):
            letter = "w" if arrives[warp] > now else "."
            if ready and warp == current:
                if left[warp]:
                    letter, left[warp] = "C", left[warp] - 1
                else:
                    letter, left[warp] = "L", COMPUTE
                    arrives[warp], run.loads = now + LATENCY, run.loads + 1
            run.rows[warp].append(letter)
        run.in_flight.append(sum(arrival > now for arrival in arrives))
    return run


# --8<-- [end:schedule]


def busy(run: Run) -> float:
    """The fraction of the clocks in which an instruction was issued."""
    clocks = len(run.in_flight)
    return sum(any(row[c] in "LC" for row in run.rows) for c in range(clocks)) / clocks


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def left(x: float, y: float, words: str, colour: str) -> str:
    return caption(x, y, words, colour, "start")


def cell(x: float, y: float, letter: str) -> str:
    if letter == "w":
        return (
            f'<path d="M{x:g} {y + 9} h{CELL}" stroke="{MUTED}" stroke-width="1.5" '
            'stroke-dasharray="3 2"/>'
        )
    colour = {"L": ORANGE, "C": BLUE}.get(letter)
    if colour is None:
        return ""
    return f'<rect x="{x:g}" y="{y}" width="{CELL - 1.5}" height="18" fill="{colour}"/>'


def draw(runs: dict[int, Run]) -> str:
    """The SVG: a group of rows for each number of warps, time from left to right."""
    parts, y = [], 44
    for warps, run in runs.items():
        words = (
            f"{warps} warp{'s' * (warps > 1)}: an instruction in {busy(run):.0%} of the clocks"
        )
        parts.append(left(8, y, words, INK))
        for warp, row in enumerate(run.rows):
            y += 24
            parts.append(left(8, y + 14, f"warp {warp}", MUTED))
            parts += [cell(72 + CELL * clock, y, row[clock]) for clock in range(66)]
        y += 58
    parts += [
        f'<rect x="8" y="8" width="14" height="14" fill="{ORANGE}"/>',
        left(28, 20, "issues a load", INK),
        f'<rect x="150" y="8" width="14" height="14" fill="{BLUE}"/>',
        left(170, 20, "computes", INK),
        f'<path d="M262 15 h24" stroke="{MUTED}" stroke-width="1.5" stroke-dasharray="3 2"/>',
        left(292, 20, "waits for its load", INK),
        left(560, 20, "time →", MUTED),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 34}" '
        'font-family="system-ui, sans-serif" font-size="15">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def main() -> None:
    clocks = 240 * (LATENCY + COMPUTE)
    turn = LATENCY + COMPUTE  # clocks from one load of a warp to its next load
    print(f"a load takes {LATENCY} clocks, then {COMPUTE} instructions use its result")
    print("warps   loads in flight   throughput × latency   busy")
    for warps in (1, 2, 4, 8):
        run = schedule(warps, clocks)
        flying = sum(run.in_flight) / clocks
        law = run.loads / clocks * LATENCY
        print(f"{warps:5} {flying:17.2f} {law:22.2f} {busy(run):6.0%}")
        assert abs(flying - law) < 0.02 * law  # Little's law, for any number of warps
        expected = min(1, warps * (1 + COMPUTE) / turn)
        assert abs(busy(run) - expected) < 0.02
        if warps > 1:  # no two warps issue in the same clock
            assert all(sum(row[c] in "LC" for row in run.rows) <= 1 for c in range(clocks))
        for row in run.rows:  # a warp computes without a pause until its next load
            assert "".join(row).count("C" * COMPUTE + "L") == row.count("L") - 1
        loads = [row.count("L") for row in run.rows]
        assert max(loads) - min(loads) <= 1  # no warp is left out
    enough = next(w for w in range(1, 32) if busy(schedule(w, clocks)) > 0.98)
    print(f"{enough} warps keep the scheduler busy: {turn} clocks / {1 + COMPUTE} instructions")
    with open("latency_hiding.svg", "w", encoding="utf-8") as file:
        file.write(draw({warps: schedule(warps, clocks) for warps in (1, 4)}))


if __name__ == "__main__":
    main()
