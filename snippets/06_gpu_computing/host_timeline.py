"""A picture of two steps on a host and a GPU, and of the wait that leaves the GPU idle.

Time goes from left to right. The host launches copies and kernels and goes on. The GPU works
through two streams: one for copies and one for kernels. An event makes the first kernel of a
step wait for its batch. The host itself waits only in `loss.item()`. After this wait the queue
of kernels is empty, so the GPU is idle until the next launch. The times are examples: a launch
takes 2 units, a copy 6 and a kernel 5.

Plain Python writes the SVG, so the program runs without any package.
"""

LAUNCH, COPY, KERNEL = 2.0, 6.0, 5.0
WIDTH, HEIGHT = 760, 262
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"
LEFT = 92  # where time begins
ROWS = {"host": 40, "compute": 122, "copies": 212}  # upper edges

# Each call of the host: its name, the stream that gets work, and an event to wait for.
CALLS = [
    ("copy 1", "copies", None),
    ("copy 2", "copies", None),
    *[(f"kernel 1{part}", "compute", "copy 1") for part in "abc"],
    ("item", None, None),  # the host waits until the kernels of step 1 are done
    *[(f"kernel 2{part}", "compute", "copy 2") for part in "abc"],
]


# --8<-- [start:launch_times]
def launch_times(calls: list, kernel: float = KERNEL) -> dict[str, tuple[str, float, float]]:
    """Return the row, the start and the end of everything that the host and the GPU do."""
    host, free, times = 0.0, {"copies": 0.0, "compute": 0.0}, {}
    for name, stream, event in calls:
        if stream is None:  # the host needs a value, so it waits for the stream of kernels
            ready = max(host, free["compute"])
            times[name] = ("host", host, ready)
            host = ready
            continue
        times[f"launch {name}"] = ("host", host, host + LAUNCH)
        host += LAUNCH  # the launch returns before the work begins
        start = max(host, free[stream], times[event][2] if event else 0.0)
        free[stream] = start + (COPY if stream == "copies" else kernel)
        times[name] = (stream, start, free[stream])
    return times


# --8<-- [end:launch_times]


def idle(times: dict[str, tuple[str, float, float]]) -> float:
    """Return how long the stream of kernels is idle between its first and its last kernel."""
    spans = sorted((start, end) for row, start, end in times.values() if row == "compute")
    return spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans)


def note_at(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" font-size="13" '
        f'text-anchor="{anchor}">{text}</text>'
    )


def bar_at(x: float, y: float, width: float, text: str, colour: str) -> str:
    frame = (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="36" rx="5" fill="{colour}" '
        f'fill-opacity="0.14" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + note_at(x + width / 2, y + 23, text, colour)


def draw(times: dict[str, tuple[str, float, float]]) -> str:
    unit = (WIDTH - LEFT - 12) / max(end for _, _, end in times.values())

    def at(time: float) -> float:
        return LEFT + unit * time

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="end" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{MUTED}"/></marker></defs>',
        note_at(4, 63, "host", INK, "start"),
        note_at(4, 138, "GPU, stream", INK, "start"),
        note_at(4, 155, "of kernels", INK, "start"),
        note_at(4, 228, "GPU, stream", INK, "start"),
        note_at(4, 245, "of copies", INK, "start"),
    ]
    for name, (row, start, end) in times.items():
        x, y, width = at(start), ROWS[row], unit * (end - start) - 2
        if name.startswith("launch"):
            work, begin, _ = times[name.removeprefix("launch ")]
            parts.append(bar_at(x, y, width, "", BLUE))
            target = at(max(begin, end)) + 3
            parts.append(
                f'<path d="M{x + width / 2:.1f} {y + 38} L{target:.1f} {ROWS[work] - 4}" '
                f'stroke="{MUTED}" fill="none" marker-end="url(#end)"/>'
            )
        else:
            text = "loss.item() waits" if name == "item" else name
            colour = ORANGE if name == "item" else GREEN if row == "compute" else BLUE
            parts.append(bar_at(x, y, width, text, colour))
    for text, first in (("five launches", "copy 1"), ("three launches", "kernel 2a")):
        parts.append(note_at(at(times[f"launch {first}"][1]), 26, text, BLUE, "start"))
    copied = at(times["copy 1"][2])
    parts.append(  # the event: the stream of kernels waits for the copy
        f'<path d="M{copied - 1:.1f} 210 V162" stroke="{ORANGE}" stroke-width="1.6" '
        'stroke-dasharray="4 3" marker-end="url(#end)"/>'
    )
    parts.append(note_at(copied + 8, 190, "kernel 1a waits for this event", ORANGE, "start"))
    gap, after = at(times["kernel 1c"][2]), at(times["kernel 2a"][1])
    parts.append(
        f'<path d="M{gap - 1:.1f} 164 V170 H{after - 1:.1f} V164" stroke="{ORANGE}" '
        'fill="none" stroke-width="1.6"/>'
    )
    parts.append(note_at((gap + after) / 2, 188, "idle", ORANGE))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    times = launch_times(CALLS)
    with open("host_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw(times))
    assert times["kernel 1a"][1] == times["copy 1"][2]  # the event orders copy and kernel
    assert times["kernel 1a"][1] > times["launch kernel 1a"][2]  # and the GPU waits for it
    _, start, end = times["copy 2"]
    assert times["kernel 1a"][1] <= start < end < times["kernel 1c"][2]  # hidden by kernels
    assert times["item"][2] == times["kernel 1c"][2] > times["item"][1]  # the host waits
    quiet = [call for call in CALLS if call[0] != "item"]
    kernels = [(name, stream, None) for name, stream, _ in quiet if stream == "compute"]
    gaps = {
        "kernels of 5 units, item() between the steps": idle(times),
        "kernels of 5 units, no item()": idle(launch_times(quiet)),
        "kernels of 1 unit, no item(), no copies": idle(launch_times(kernels, kernel=1.0)),
    }
    for case, gap in gaps.items():
        print(f"{case:46} the GPU is idle for {gap:g} units")
    # one launch after the wait; nothing if the host is ahead; one unit before each kernel but
    # the first if a launch takes longer than a kernel, although the host never waits
    assert list(gaps.values()) == [LAUNCH, 0, 5 * (LAUNCH - 1)]


if __name__ == "__main__":
    main()
