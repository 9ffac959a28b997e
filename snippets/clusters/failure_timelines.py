"""Draws what three ranks do when rank 1 is killed, cut off, slow, or has a NaN.

A simulation computes when each rank computes, waits and communicates. In every case, ranks 0
and 2 are healthy, and in every case they are the ranks on which something is to be seen. Plain
Python writes the SVG.
"""

from itertools import pairwise
from typing import NamedTuple

RANKS, FAULTY, STEPS, FAULT_STEP = 3, 1, 3, 1
COMPUTE, SLOW_COMPUTE, REDUCE, TIMEOUT = 200, 350, 80, 400  # ms
CASES = {  # fault: what the user sees, on the healthy ranks
    "killed": "Connection closed by peer",
    "cut off": "Timed out",
    "slow": "a long all-reduce",
    "NaN": "loss NaN",
}
INK, MUTED, BLUE, ORANGE, RED = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#b91c1c"
COLOURS = {"compute": BLUE, "all-reduce": ORANGE, "wait": MUTED, "NaN": RED}


class Phase(NamedTuple):
    what: str  # "compute", "wait", "all-reduce" or "NaN"
    start: int
    end: int


# --8<-- [start:simulate]
def simulate(fault: str) -> tuple[list[list[Phase]], list[str]]:
    """What each rank does, and the event at the end of its row."""
    rows: list[list[Phase]] = [[] for _ in range(RANKS)]
    ends, now = [""] * RANKS, 0
    for step in range(STEPS):
        arrivals = []
        for rank, row in enumerate(rows):
            faulty = rank == FAULTY and step == FAULT_STEP
            duration = SLOW_COMPUTE if fault == "slow" and rank == FAULTY else COMPUTE
            if faulty and fault in ("killed", "cut off"):
                row.append(Phase("compute", now, now + duration // 2))
                ends[rank] = fault
                continue
            spoiled = fault == "NaN" and (faulty or step > FAULT_STEP)
            row.append(Phase("NaN" if spoiled else "compute", now, now + duration))
            arrivals.append(row[-1].end)
        if len(arrivals) < RANKS:  # a closed connection ends the wait, silence does not
            patience = 0 if fault == "killed" else TIMEOUT
            for rank, row in enumerate(rows):
                if rank != FAULTY:
                    row.append(Phase("wait", row[-1].end, row[-1].end + patience))
                    ends[rank] = CASES[fault]
            return rows, ends
        now = max(arrivals)
        for row in rows:
            row.append(Phase("wait", row[-1].end, now))
            row.append(Phase("all-reduce", now, now + REDUCE))
        now += REDUCE
    return rows, ends


# --8<-- [end:simulate]


def total(row: list[Phase], what: str) -> int:
    return sum(span.end - span.start for span in row if span.what == what)


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw_span(span: Phase, x: float, y: float, scale: float) -> str:
    """A box; a wait is dashed and has no filling, a NaN is labelled."""
    left, width = x + span.start * scale, (span.end - span.start) * scale
    colour = COLOURS[span.what]
    style = f'stroke="{colour}" stroke-width="1.3"'
    style += ' fill="none" stroke-dasharray="4 3"' if span.what == "wait" else ""
    style += f' fill="{colour}" fill-opacity="0.2"' if span.what != "wait" else ""
    label = {"NaN": "NaN", "wait": "waits" if width > 40 else ""}.get(span.what, "")
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="20" rx="2" {style}/>'
        + draw_text(round(left + 4, 1), y + 15, label, colour, 13)
    )


def draw(cases: dict[str, tuple[list[list[Phase]], list[str]]]) -> str:
    """One panel for each fault; in a panel one row for each rank."""
    scale, left = 0.34, 62
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 520" '
        'font-family="system-ui, sans-serif">'
    ]
    titles = {
        "killed": "Rank 1 is killed: the other ranks get an error at once",
        "cut off": "Rank 1 is cut off: the other ranks wait until their timeout",
        "slow": "Rank 1 is slow: the other ranks spend the difference in all-reduce",
        "NaN": "Rank 1 computes a NaN: one step later, all ranks have it",
    }
    for panel, (fault, (rows, ends)) in enumerate(cases.items()):
        top = 18 + 120 * panel
        parts.append(draw_text(4, top, titles[fault], INK, 15, 'font-weight="600"'))
        for rank, row in enumerate(rows):
            y = top + 12 + 26 * rank
            parts.append(draw_text(4, y + 15, f"rank {rank}", INK, 13))
            parts += [draw_span(s, left, y, scale) for s in row if s.end > s.start]
            colour = RED if rank == FAULTY else INK
            end = left + row[-1].end * scale + 8
            parts.append(draw_text(round(end, 1), y + 15, ends[rank], colour, 13))
    legend = 62
    for what in ("compute", "all-reduce", "wait"):
        parts.append(draw_span(Phase(what, 0, 80), legend, 494, scale))
        parts.append(draw_text(legend + 36, 509, what, INK, 13))
        legend += 140
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    cases = {fault: simulate(fault) for fault in CASES}
    with open("failure_timelines.svg", "w", encoding="utf-8") as file:
        file.write(draw(cases))
    for fault, (rows, _) in cases.items():
        waits = [total(row, "wait") for row in rows]
        spoiled = [total(row, "NaN") for row in rows]
        print(f"{fault + ':':8} wait {waits} ms, compute with a NaN {spoiled} ms")
        for row in rows:  # nothing is left out, and nothing happens twice
            assert row[0].start == 0
            assert all(a.end == b.start for a, b in pairwise(row))
        assert waits[FAULTY] == min(waits)  # the faulty rank never waits longest
    assert max(total(row, "wait") for row in cases["killed"][0]) == 0
    assert [total(row, "wait") for row in cases["cut off"][0]] == [TIMEOUT, 0, TIMEOUT]
    late = STEPS * (SLOW_COMPUTE - COMPUTE)
    assert [total(row, "wait") for row in cases["slow"][0]] == [late, 0, late]
    assert [total(row, "NaN") for row in cases["NaN"][0]] == [200, 400, 200]
    assert cases["cut off"][1] == ["Timed out", "cut off", "Timed out"]


if __name__ == "__main__":
    main()
