"""Draws requests that share steps: five requests in one slot, and the same requests in three.

A step lasts a fixed time for reading the weights, and a little longer for each token in it. So
answers that share steps share the fixed time. The program counts the time of each request in
both cases. Plain Python writes shared_steps.svg.
"""

FIXED, TOKEN = 10.0, 0.2  # ms of a step, and of each token in it
REQUESTS = {  # arrival in ms, tokens of the prompt, tokens of the answer
    "A": (0, 20, 6),
    "B": (5, 30, 4),
    "C": (16, 20, 5),
    "D": (30, 30, 3),
    "E": (40, 20, 4),
}
INK, MUTED, BLUE, ORANGE, GREEN = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#15803d"
Step = tuple[float, float, dict[int, str]]  # start, end, and the request in each slot


# --8<-- [start:serve]
def serve(slots: int) -> tuple[list[Step], dict[str, list[float]]]:
    """Continuous batching. The steps, and the times at which each request gets its tokens."""
    waiting, running, clock = list(REQUESTS), {}, 0.0
    steps: list[Step] = []
    tokens: dict[str, list[float]] = {name: [] for name in REQUESTS}
    while waiting or running:
        if not running:
            clock = max(clock, REQUESTS[waiting[0]][0])
        work = len(running)
        for slot in range(slots):
            if slot not in running and waiting and REQUESTS[waiting[0]][0] <= clock:
                running[slot] = waiting.pop(0)
                work += REQUESTS[running[slot]][1]  # the whole prompt
        start, clock = clock, clock + FIXED + TOKEN * work
        steps.append((start, clock, dict(running)))
        for slot, name in list(running.items()):
            tokens[name].append(clock)
            if len(tokens[name]) == REQUESTS[name][2]:
                del running[slot]
    return steps, tokens


# --8<-- [end:serve]


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


def draw_panel(y: float, title: str, slots: int, scale: float) -> list[str]:
    """The steps of one server, with a bar below for the waits of request C."""
    steps, tokens = serve(slots)
    colours = dict(zip(REQUESTS, (BLUE, ORANGE, GREEN, MUTED, "#7c3aed"), strict=True))
    parts = [draw_text(4, y, title, INK, 15)]
    for slot in range(slots):
        parts.append(draw_text(4, y + 30 + 30 * slot, f"slot {slot}", MUTED, 13))
    seen = set()
    for start, end, row in steps:
        for slot, name in row.items():
            x, top = 60 + scale * start, y + 12 + 30 * slot
            parts.append(box(x + 0.5, top, scale * (end - start) - 1, 26, colours[name]))
            mark = name if name in seen else f"{name}*"
            seen.add(name)
            parts.append(draw_text(x + 5, top + 18, mark, INK, 13))
    below = y + 26 + 30 * slots
    arrival, (first, *_, last) = REQUESTS["C"][0], tokens["C"]
    for begin, end, words, colour in (
        (arrival, first, "TTFT of C", GREEN),
        (first, last, "4 gaps", INK),
    ):
        x1, x2 = 60 + scale * begin, 60 + scale * end
        parts.append(
            f'<path d="M{x1:.1f} {below - 5}V{below + 5}M{x1:.1f} {below}H{x2:.1f}'
            f'M{x2:.1f} {below - 5}V{below + 5}" fill="none" stroke="{colour}" '
            'stroke-width="1.8"/>'
        )
        parts.append(draw_text(x1 + 4, below + 18, words, colour, 13))
    return parts


def draw() -> str:
    scale = 650 / serve(1)[0][-1][1]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 272" '
        'font-family="system-ui, sans-serif">',
        *draw_panel(
            20, "One request at a time: each step reads all weights for one request.", 1, scale
        ),
        *draw_panel(126, "Continuous batching: up to three requests share a step.", 3, scale),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    print("slots   steps   all done after   TTFT of C   latency of C")
    ends = {}
    for slots in (1, 3):
        steps, tokens = serve(slots)
        ends[slots] = steps[-1][1]
        arrival, (first, *_, last) = REQUESTS["C"][0], tokens["C"]
        print(f"{slots:5} {len(steps):7} {ends[slots]:13.0f} ms {first - arrival:8.0f} ms "
              f"{last - arrival:11.0f} ms")  # fmt: skip
        assert [len(tokens[name]) for name in REQUESTS] == [n for _, _, n in REQUESTS.values()]
        assert sum(len(row) for _, _, row in steps) == sum(map(len, tokens.values()))
        work = sum(prompt + answer - 1 for _, prompt, answer in REQUESTS.values())
        busy = sum(end - start for start, end, _ in steps)
        assert abs(busy - FIXED * len(steps) - TOKEN * work) < 1e-9, "the tokens are the same"
        assert all(times[0] > REQUESTS[name][0] + FIXED for name, times in tokens.items())
    steps = [len(serve(slots)[0]) for slots in (1, 3)]
    assert steps[0] == sum(answer for *_, answer in REQUESTS.values()), "a step for each token"
    saved = ends[1] - ends[3]
    assert abs(saved - FIXED * (steps[0] - steps[1])) < 1e-9, "only the fixed time is saved"
    fewer = steps[0] - steps[1]
    print(f"{fewer} steps fewer, each with {FIXED:.0f} ms of reading: {saved:.0f} ms")
    with open("shared_steps.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
