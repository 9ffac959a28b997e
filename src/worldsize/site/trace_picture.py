"""Draw the still picture of a trace: what each rank does over the logical time.

A reader without JavaScript sees this picture instead of the viewer, and the list of all traces
shows it next to each program. Each rank is a row. A coloured part means that the rank computes,
and a gap means that it communicates or waits. Lines are messages, and frames are collectives.
"""

from __future__ import annotations

import math
from itertools import pairwise

WIDTH, ROW, BAR, EDGE = 720, 20, 13, 6


def alt(trace: dict) -> str:
    """Return the alt text of the picture."""
    sentences = [
        f"{trace['program']}: one row for each of {trace['ranks']} ranks, with logical time "
        "from left to right. A rank computes where its row is coloured, and it communicates "
        "or waits in the gaps."
    ]
    if trace["messages"]:
        sentences.append("Lines between the rows are messages.")
    if trace["collectives"]:
        sentences.append("Frames are collectives.")
    if trace["hangs"]:
        sentences.append("At the end, no rank makes progress.")
    return " ".join(sentences)


def draw(trace: dict) -> str:
    """Return the picture as SVG."""
    last = trace["steps"][-1][0]
    scale = (WIDTH - 2 * EDGE) / last
    height = trace["ranks"] * ROW + EDGE

    def x(tick: float) -> float:
        return round(EDGE + (tick - 1) * scale, 1)

    parts = []
    starts, ends = _operation_ticks(trace)
    for collective in trace["collectives"]:
        begin = min(starts.get(each, 0) for each in collective["parts"])
        end = max(ends.get(each, last + 1) for each in collective["parts"])
        ranks = [trace["operations"][each]["rank"] for each in collective["parts"]]
        bad = collective.get("missing") or collective.get("mismatch")
        kind, rows = "bad" if bad else "all", range(min(ranks), max(ranks) + 1)
        parts.append(_frame(kind, x(max(begin, 1)), (end - begin) * scale, rows))
    in_collective = {
        each for collective in trace["collectives"] for each in collective["parts"]
    }
    for number, operation in enumerate(trace["operations"]):
        if operation.get("end") == "never" and number not in in_collective:
            begin, rank = max(starts.get(number, 0), 1), operation["rank"]
            width = (last + 1 - begin) * scale
            parts.append(_frame("bad", x(begin), width, range(rank, rank + 1)))
    for rank in range(trace["ranks"]):
        for begin, end in _computing(trace, rank, last):
            size = f'width="{(end - begin) * scale:.1f}" height="{BAR}"'
            fill = _colour(rank, trace["ranks"])
            parts.append(f'<rect x="{x(begin)}" y="{rank * ROW + 5}" {size} fill="{fill}"/>')
    for send, receive in trace["messages"]:
        rows = [trace["operations"][each]["rank"] * ROW + 11.5 for each in (send, receive)]
        place = x(starts.get(send, 0) + 0.5), x(ends.get(receive, last + 1) + 0.5)
        parts.append(f'<path d="M{place[0]} {rows[0]}L{place[1]} {rows[1]}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}">\n'
        "<style>path,.all,.bad{fill:none;stroke:#7d8893;stroke-width:1.2}"
        ".bad{stroke:#d6453d;stroke-dasharray:4 3;stroke-width:2}</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _frame(kind: str, left: float, width: float, rows: range) -> str:
    """Return a frame over rows. The kind is "all", or "bad" for a call that never returns."""
    place = f'x="{left}" y="{rows[0] * ROW + 1.5}" width="{max(3, width):.1f}"'
    return f'<rect {place} height="{len(rows) * ROW}" rx="3" class="{kind}"/>'


def _operation_ticks(trace: dict) -> tuple[dict[int, int], dict[int, int]]:
    """Return the tick in which each operation starts, and the tick in which it ends."""
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    for tick, _, kind, _, what, *_ in trace["steps"]:
        for operation in what if isinstance(what, list) else ():
            if kind in ("call", "start"):
                starts.setdefault(operation, tick)
            elif kind in ("done", "waited"):
                ends.setdefault(operation, tick)
    return starts, ends


def _computing(trace: dict, rank: int, last: int) -> list[tuple[int, int]]:
    """Return the first tick and the end of each interval in which a rank computes.

    A rank does not compute while it is in a call or in a wait.
    """
    steps = [step for step in trace["steps"] if step[1] == rank]
    found: list[tuple[int, int]] = []
    end = [min(steps[-1][0] + 1, last + 1)] if steps else []
    for step, following in pairwise([*steps, *end]):
        if step[2] in ("call", "wait"):
            continue
        until = following if isinstance(following, int) else following[0]
        if found and found[-1][1] == step[0]:
            found[-1] = found[-1][0], until
        else:
            found.append((step[0], until))
    return found


def _colour(rank: int, ranks: int) -> str:
    """Return the colour of a rank, with the same hue as in the viewer.

    The viewer uses oklch colours. Programs that show the PDF and the EPUB do not support these
    colours, so they are converted to sRGB, with the matrices of Oklab (Björn Ottosson, 2020).
    """
    lightness, chroma, hue = 0.62, 0.12, math.radians(235 + 360 * rank / ranks)
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    bytes_ = (
        round(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055))
        for x in (min(1.0, max(0.0, each)) for each in linear)
    )
    return "#" + "".join(f"{each:02x}" for each in bytes_)
