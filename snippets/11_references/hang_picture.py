"""Draws a hang: four ranks, three collectives, and one rank that never calls the third one.

The program computes when each rank arrives at each collective and when it reports a timeout.
The rank that arrives first also reports first, so its message says nothing about the rank at
fault. A second computation in ticks of 0.1 s must give the same times. Plain Python writes
the SVG.
"""

# Tenths of a second that each rank computes before each of the three all-reduces.
WORK = [[10, 12, 11], [13, 10, None], [9, 14, 13], [12, 9, 8]]  # None: the batch never comes
TIMEOUT = 20
INK, MUTED, BLUE, ORANGE, GREY = "#1f2937", "#52525b", "#0b6e99", "#c2410c", "#6b7280"
TOOLS = [
    "the logs: rank {first} reports a timeout first, and rank {culprit} reports nothing",
    "stacks: rank {culprit} is in next_batch, and the other ranks are in all_reduce",
    "Flight Recorder: rank {culprit} has {few} calls, and the other ranks have {many}",
    "monitored_barrier: rank {culprit} did not arrive",
]


# --8<-- [start:times]
def arrivals(work: list[list]) -> list[list]:
    """When each rank calls each collective, in tenths of a second; None if it never does."""
    ends, times = 0, [[] for _ in work]
    for number in range(len(work[0])):
        for rank, own in enumerate(times):
            spent = work[rank][number]
            own.append(None if ends is None or spent is None else ends + spent)
        latest = [own[number] for own in times]
        ends = None if None in latest else max(latest)  # when all ranks have called it
    return times


def reports(times: list[list], timeout: int) -> dict[int, int]:
    """When each rank that waits in the unfinished collective reports its timeout."""
    return {rank: own[-1] + timeout for rank, own in enumerate(times) if own[-1] is not None}


# --8<-- [end:times]


def reports_by_ticks(work: list[list], timeout: int) -> dict[int, int]:
    """The same reports from a simulation that advances every rank by one tick at a time."""
    left = [ranks[0] for ranks in work]  # ticks of computing before the next call
    calls, waited, found = [0] * len(work), [0] * len(work), {}
    for now in range(200):
        if all(ticks == 0 for ticks in left):  # everyone is in the collective
            calls = [count + 1 for count in calls]
            if calls[0] == len(work[0]):  # the last collective has ended
                return found
            left = [ranks[count] for ranks, count in zip(work, calls, strict=True)]
            waited = [0] * len(work)
        for rank, ticks in enumerate(left):
            if ticks == 0:
                if waited[rank] == timeout:
                    found[rank] = now
                waited[rank] += 1
            elif ticks is not None:
                left[rank] = ticks - 1
    return found


def text_element(
    x: float, y: float, text: str, colour: str = INK, size: int = 14, extra=""
) -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" {extra}>{text}</text>'


def bar(x: float, y: float, width: float, colour: str, filled: bool, dashed=False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="26" fill="{colour}" '
        f'fill-opacity="{0.55 if filled else 0.12}" stroke="{colour}" '
        f'stroke-width="1.5"{dash}/>'
    )


def draw(times: list[list], found: dict[int, int], lines: list[str]) -> str:
    def at(tenths: float) -> float:
        return 64 + 10 * tenths

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 368" '
        'font-family="system-ui, sans-serif">'
    ]
    finished = [max(own[number] for own in times) for number in range(2)]
    for number, end in enumerate(finished):
        parts += [
            f'<line x1="{at(end)}" y1="30" x2="{at(end)}" y2="188" stroke="{INK}" '
            'stroke-width="1.5" stroke-dasharray="2 3"/>',
            text_element(at(end) - 46, 22, f"call {number + 1} ends", INK, 13),
        ]
    for rank, own in enumerate(times):
        y, start = 36 + 38 * rank, 0
        parts += [text_element(8, y + 18, f"rank {rank}")]
        for number, arrival in enumerate(own):
            end = finished[number] if number < 2 else found.get(rank)
            if arrival is None:
                parts += [bar(at(start), y, 10 * (62 - start), GREY, False, True)]
                parts += [
                    text_element(at(start) + 8, y + 18, "waits for a batch that never comes")
                ]
                continue
            parts += [bar(at(start), y, 10 * (arrival - start), BLUE, True)]
            if end > arrival:
                parts += [bar(at(arrival), y, 10 * (end - arrival), ORANGE, False)]
            start = end
        if rank in found:
            parts += [text_element(at(own[-1]) + 8, y + 18, "waits in all_reduce")]
            x = at(found[rank])
            parts += [f'<circle cx="{x}" cy="{y + 13}" r="6" fill="{ORANGE}"/>']
    parts += [bar(64, 206, 24, BLUE, True), text_element(96, 224, "computes", MUTED, 13)]
    parts += [bar(176, 206, 24, ORANGE, False), text_element(208, 224, "waits", MUTED, 13)]
    parts += [f'<circle cx="276" cy="219" r="6" fill="{ORANGE}"/>']
    parts += [text_element(290, 224, "reports “Timed out”", MUTED, 13)]
    parts += [text_element(8, 262, "What each tool shows", INK, 14, 'font-weight="600"')]
    for number, line in enumerate(lines):
        parts += [text_element(8, 286 + 24 * number, line, INK, 14)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    times = arrivals(WORK)
    found = reports(times, TIMEOUT)
    assert found == reports_by_ticks(WORK, TIMEOUT)
    first = min(found, key=found.get)
    (culprit,) = set(range(len(WORK))) - set(found)
    counts = [sum(arrival is not None for arrival in own) for own in times]
    names = {
        "first": first,
        "culprit": culprit,
        "few": counts[culprit],
        "many": max(counts),
    }
    lines = [line.format(**names) for line in TOOLS]
    with open("hang_picture.svg", "w", encoding="utf-8") as file:
        file.write(draw(times, found, lines))

    for rank, own in enumerate(times):
        if rank in found:
            print(f"rank {rank}: calls all_reduce 3 at {own[-1] / 10:.1f} s, ", end="")
            print(f"reports a timeout at {found[rank] / 10:.1f} s")
        else:
            print(f"rank {rank}: never calls all_reduce 3, reports nothing")
    print(f"first report: rank {first}; rank at fault: {culprit}")
    # The order of the reports is the order of arrival. It never contains the rank at fault.
    assert sorted(found, key=found.get) == sorted(found, key=lambda rank: times[rank][-1])
    assert first != culprit and WORK[first][-1] == min(own[-1] for own in WORK if own[-1])
    # Control case: if rank 1 gets its batch, all calls end and no rank reports a timeout.
    assert reports_by_ticks([[ticks or 10 for ticks in own] for own in WORK], TIMEOUT) == {}


if __name__ == "__main__":
    main()
