"""Draws four ways in which a large job loses time: failures, slow ranks, messages and bubbles.

The upper half is one life of a job, from a failure to the next one. The lower half shows one
step of four ranks, and one pipeline of three stages. All widths come from small schedules, and
the program checks that the parts of each schedule add up. Plain Python writes the SVG.
"""

import itertools

INTERVAL, SAVE, RESTART, LIFE = 20, 3, 12, 94  # minutes
RANKS = {"rank 0": 9.0, "rank 1": 8.6, "rank 2": 11.5, "rank 3": 9.2}  # time to compute
EXCHANGE = 2.0  # time of the all-reduce, in the same unit
STAGES, MICRO_BATCHES = 3, 4

INK, MUTED, BLUE, ORANGE, GREEN, PURPLE = (
    "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d", "#7c3aed",
)  # fmt: skip
COLOURS = {
    "restart": ORANGE, "work": BLUE, "save": PURPLE, "lost": ORANGE,
    "compute": BLUE, "wait": ORANGE, "all-reduce": GREEN, "idle": ORANGE,
}  # fmt: skip
Span = tuple[str, float, float]  # kind, begin, end


# --8<-- [start:schedules]
def one_life() -> list[Span]:
    """What a job does from one failure to the next."""
    spans, now = [("restart", 0, RESTART)], RESTART
    while now + INTERVAL + SAVE <= LIFE:
        spans += [("work", now, now + INTERVAL)]
        spans += [("save", now + INTERVAL, now + INTERVAL + SAVE)]
        now += INTERVAL + SAVE
    return [*spans, ("lost", now, LIFE)]


def one_step(compute: float) -> list[Span]:
    """What one rank does in a step: it waits for the slowest rank before the all-reduce."""
    slowest = max(RANKS.values())
    return [
        ("compute", 0, compute),
        ("wait", compute, slowest),
        ("all-reduce", slowest, slowest + EXCHANGE),
    ]


def one_pipeline(stage: int) -> list[Span]:
    """What one stage does, if a forward and a backward together take one slot."""
    slots = MICRO_BATCHES + STAGES - 1
    working = [("compute", stage + k, stage + k + 1) for k in range(MICRO_BATCHES)]
    return [("idle", 0, stage), *working, ("idle", stage + MICRO_BATCHES, slots)]


# --8<-- [end:schedules]


def draw_text(
    x: float, y: float, words: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{words}</text>'


def draw_spans(spans: list[Span], x: float, y: float, scale: float, words: bool) -> list[str]:
    """One row of boxes; boxes of lost time have a dashed outline."""
    parts = []
    for kind, begin, end in spans:
        if end == begin:
            continue
        dash = ' stroke-dasharray="5 4"' if COLOURS[kind] == ORANGE else ""
        parts.append(
            f'<rect x="{x + begin * scale:.1f}" y="{y}" width="{(end - begin) * scale:.1f}" '
            f'height="26" rx="3" fill="{COLOURS[kind]}" fill-opacity="0.14" '
            f'stroke="{COLOURS[kind]}" stroke-width="1.5"{dash}/>'
        )
        if words and (end - begin) * scale > 30:
            middle = x + (begin + end) / 2 * scale
            parts.append(
                draw_text(round(middle, 1), y + 18, kind, INK, 13, 'text-anchor="middle"')
            )
    return parts


def badge(x: float, y: float, number: int) -> str:
    middle = 'text-anchor="middle" font-weight="600"'
    return f'<circle cx="{x}" cy="{y}" r="11" fill="{ORANGE}"/>' + draw_text(
        x, y + 5, str(number), "#ffffff", 14, middle
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 366" '
        'font-family="system-ui, sans-serif">'
    ]
    parts += [badge(16, 18, 1), draw_text(36, 23, "One life of the job, between two failures")]
    parts += draw_spans(one_life(), 8, 54, 7.4, words=True)
    end = 8 + LIFE * 7.4
    for at in (8, end):
        parts.append(
            f'<path d="M{at:.1f} 44v46" stroke="{ORANGE}" stroke-width="3" fill="none"/>'
        )
    parts += [draw_text(8, 106, "failure", ORANGE, 13)]
    parts += [draw_text(round(end, 1), 106, "failure", ORANGE, 13, 'text-anchor="end"')]
    parts += [
        draw_text(
            200, 106, "narrow boxes are saves; the work at the end was never saved", MUTED, 13
        )
    ]

    parts += [
        badge(16, 144, 2),
        badge(42, 144, 3),
        draw_text(62, 149, "One step of four ranks"),
    ]
    for n, (name, compute) in enumerate(RANKS.items()):
        y = 164 + 34 * n
        parts += [draw_text(8, y + 18, name, MUTED, 13)]
        parts += draw_spans(one_step(compute), 60, y, 21, words=False)
    parts += [draw_text(66, 182, "compute", INK, 13), draw_text(252, 182, "wait", INK, 13)]
    parts += [draw_text(62, 318, "2: rank 2 is slow, so the others wait", MUTED, 13)]
    parts += [draw_text(62, 338, "3: the all-reduce (green) takes time itself", MUTED, 13)]

    parts += [badge(396, 144, 4), draw_text(416, 149, "One pipeline of three stages")]
    for stage in range(STAGES):
        y = 164 + 34 * stage
        parts += [draw_text(388, y + 18, f"stage {stage}", MUTED, 13)]
        parts += draw_spans(one_pipeline(stage), 444, y, 44, words=False)
        for k in range(MICRO_BATCHES):
            x = 444 + 44 * (stage + k) + 22
            parts += [draw_text(x, y + 18, str(k), INK, 13, 'text-anchor="middle"')]
    parts += [draw_text(444, 284, "each number is a micro-batch", MUTED, 13)]
    parts += [draw_text(444, 304, "4: dashed boxes are the bubble", MUTED, 13)]
    return "\n".join([*parts, "</svg>", ""])


def seconds(spans: list[Span], *kinds: str) -> float:
    return sum(end - begin for kind, begin, end in spans if kind in kinds)


def main() -> None:
    with open("where_time_goes.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    rows = [one_life(), *map(one_step, RANKS.values()), *map(one_pipeline, range(STAGES))]
    for spans in rows:  # each span begins where the span before it ends
        assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))

    life = one_life()
    saves = (LIFE - RESTART) // (INTERVAL + SAVE)
    assert seconds(life, "work") == saves * INTERVAL and seconds(life, "save") == saves * SAVE
    parts = ", ".join(
        f"{kind} {seconds(life, kind)}" for kind in COLOURS if seconds(life, kind)
    )
    print(f"1 minutes of {LIFE} between two failures: {parts}")

    steps = [one_step(compute) for compute in RANKS.values()]
    whole = max(RANKS.values()) + EXCHANGE
    assert all(abs(seconds(step, *COLOURS) - whole) < 1e-9 for step in steps)
    assert min(seconds(step, "wait") for step in steps) == 0  # the slowest rank never waits
    waiting = sum(seconds(step, "wait") for step in steps) / len(steps) / whole
    print(f"2 waiting for the slowest of {len(RANKS)} ranks: {waiting:.0%} of the step")
    print(f"3 the all-reduce: {EXCHANGE / whole:.0%} of the step")

    idle = [seconds(one_pipeline(stage), "idle") for stage in range(STAGES)]
    slots = MICRO_BATCHES + STAGES - 1
    bubble = (STAGES - 1) / slots  # the formula of chapter 03
    assert all(abs(each / slots - bubble) < 1e-9 for each in idle)
    print(f"4 bubble of {STAGES} stages with {MICRO_BATCHES} micro-batches: {bubble:.0%}")


if __name__ == "__main__":
    main()
