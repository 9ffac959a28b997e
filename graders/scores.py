"""Scores: counts the cost of a graded program, with the same result on every machine.

The score of a step is the score of its largest group, and of the rank with the highest cost.
Lower is better. Messages and bytes are counted for the calls that a probe makes within a
`lesson.phase`. A probe reports all other costs as the fact `scores`, and a trial sets
`workspace.scores`. The order in which the stages of a pipeline work is the fact `schedule`, for
example ["F0", "F1", "B0", …] on each rank.
"""

from collections.abc import Sequence
from typing import Any

COST = {"F": 1, "B": 2}  # a backward pass takes as long as two forward passes
# in pixels: the width of a unit of time and of the names, the height of a row and of a title
WIDE, HIGH, LEFT, GAP = 18, 22, 56, 26


def sent(name: str, size: int, n: int) -> float:
    """Return the bytes that a rank sends if a ring of n ranks does this collective.

    `size` is the number of bytes of the first tensor of the call.
    """
    if name in ("irecv", "recv"):
        return 0
    if name in ("gather", "scatter"):
        return (n - 1) * size
    if name in ("all_reduce", "all_reduce_coalesced"):
        return 2 * (n - 1) / n * size
    if name.startswith("reduce_scatter") or name in ("all_gather", "all_to_all"):
        return (n - 1) * size  # the tensor is one of n parts
    if name.startswith(("all_gather", "all_to_all")):
        return (n - 1) / n * size
    return size


def of(group: Any) -> dict[str, float]:
    """Return the scores of a `graders.protocol.Group`."""
    found: dict[str, float] = {}
    calls = [
        [call for call in rank.calls if call.phase and not call.name.endswith("recv")]
        for rank in group.ranks
    ]
    pickled = any("object" in call.name for rank in calls for call in rank)  # unknown bytes
    if any(calls) and not pickled:
        found["messages"] = max(map(len, calls))
        found["bytes sent"] = round(max(sum(call.sent for call in rank) for rank in calls))
    for name, value in (
        (n, v) for told in group.facts("scores") for n, v in (told or {}).items()
    ):
        found[name] = max(value, found.get(name, 0))
    if schedule := schedule_of(group):
        found["bubble percent"] = bubble(schedule)
    return found


# --- the schedule of a pipeline -----------------------------------------------------------


def schedule_of(group: Any) -> list[list[str]]:
    """Return the events of each stage of a pipeline of this group, as far as they are known."""
    return [events for events in group.facts("schedule") if events]


def one_f_one_b(p: int, m: int) -> list[list[str]]:
    """Return the schedule 1F1B for m micro-batches and p stages."""
    orders = []
    for stage in range(p):
        forwards, backwards = ([f"{letter}{k}" for k in range(m)] for letter in "FB")
        lead = min(p - stage, m) - 1
        pairs = zip(forwards[lead:], backwards, strict=False)
        orders.append(
            forwards[:lead] + [e for pair in pairs for e in pair] + backwards[m - lead :]
        )
    return orders


Bar = tuple[int, str, int, int]  # stage, event, begin, end


def bars(schedule: Sequence[Sequence[str]]) -> list[Bar]:
    """Return when each event begins and ends.

    An event begins as soon as its stage is free and its input exists. Events that never begin,
    because stages wait for each other, are left out.
    """
    last, found = len(schedule) - 1, []
    ends, free = dict.fromkeys([(-1, f"F{k}") for k in range(len(schedule[0]))], 0), {}
    left = [list(events) for events in schedule]
    while moved := [
        (stage, events.pop(0), need)
        for stage, events in enumerate(left)
        if events and (need := _need(stage, events[0], last)) in ends
    ]:
        for stage, event, need in moved:
            begin = max(free.get(stage, 0), ends[need])
            free[stage] = ends[stage, event] = begin + COST[event[0]]
            found.append((stage, event, begin, free[stage]))
    return found


def _need(stage: int, event: str, last: int) -> tuple[int, str]:
    """Return the stage and the event that must end first. Stage -1 has all inputs."""
    if event[0] == "F":
        return stage - 1, event
    return (stage, f"F{event[1:]}") if stage == last else (stage + 1, event)


def bubble(schedule: Sequence[Sequence[str]]) -> float:
    """Return the percentage of the time of all stages in which they wait."""
    found = bars(schedule)
    work = sum(end - begin for _, _, begin, end in found)
    return round(100 - 100 * work / (len(schedule) * max(end for *_, end in found)), 1)


def draw(yours: Sequence[Sequence[str]]) -> str:
    """Return an SVG of this schedule, and of the schedule 1F1B below it."""
    m = len({event for events in yours for event in events if event[0] == "F"}) or 1
    parts, top, right = [], 0, 0
    for name, schedule in (("yours", yours), ("1F1B", one_f_one_b(len(yours), m))):
        found = bars(schedule)
        missing = sum(map(len, schedule)) - len(found)
        said = f"{missing} events never begin" if missing else f"bubble {bubble(schedule)}%"
        parts.append(f'<text x="0" y="{top + 16}">{name}: {said}</text>')
        for stage in range(len(schedule)):
            y = top + GAP + stage * HIGH + 15
            parts.append(f'<text x="0" y="{y}">stage {stage}</text>')
        for stage, event, begin, end in found:
            x, y = LEFT + begin * WIDE, top + GAP + stage * HIGH
            wide = (end - begin) * WIDE
            parts.append(
                f'<rect class="{event[0]}" x="{x}" y="{y}" width="{wide}" height="{HIGH}"/>'
                f'<text class="on" x="{x + wide / 2:g}" y="{y + 15}">{event[1:]}</text>'
            )
            right = max(right, x + wide)
        top += GAP + len(schedule) * HIGH + GAP // 2
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 {right + 8} {top + 10}" '
        f'width="{right + 8}" font-family="sans-serif" font-size="12">\n'
        "<style>text { fill: #808080 } .F { fill: #3d6fa3 } .B { fill: #9a6410 } "
        "rect { stroke: #ffffff } .on { fill: #ffffff; text-anchor: middle }</style>\n"
        f'{body}\n<text x="0" y="{top + 4}">blue: forward, brown: backward, '
        "with the number of the micro-batch</text>\n</svg>\n"
    )


# --- a report -----------------------------------------------------------------------------


def report(graded: dict[str, tuple[str, str, dict[int, dict[str, float]]]]) -> str:
    """Return a report in TOML: for each lab the graded program and the scores of each step."""
    text = ["# python labs/check.py --report wrote this; it is graded again before it is taken"]
    for lab, (key, value, steps) in graded.items():
        quoted = value.replace("\\", "\\\\").replace('"' * 3, '\\"' * 3)
        value = f'"""\n{quoted}"""' if key == "program" else f'"{quoted}"'
        text += ["", f"[{lab}]"]
        for number, scores in steps.items():
            inner = ", ".join(f'"{name}" = {value}' for name, value in scores.items())
            text.append(f"step{number} = {{ {inner} }}")
        text.append(f"{key} = {value}")
    return "\n".join(text) + "\n"
