"""Counts the cost of a graded program, with the same result on every machine.

A lower score is better. The score of a group is that of the rank with the highest cost, and the
score of a step is that of its largest group. Messages and bytes are counted for the calls that
a probe makes within a `lesson.phase`. A probe reports all other costs as the fact `scores`, and
a trial sets `workspace.scores`. The order in which a stage of a pipeline works is the fact
`schedule`, for example ["F0", "F1", "B0", …].
"""

from collections.abc import Sequence
from typing import Any

COST = {"F": 1, "B": 2}  # a backward pass takes as long as two forward passes
# the sizes in a drawing, in pixels
UNIT_WIDTH, ROW_HEIGHT = 18, 22  # one unit of time, one stage
NAME_WIDTH, TITLE_HEIGHT = 56, 26


def bytes_sent(name: str, size: int, n: int) -> float:
    """Return the bytes that a rank sends if a ring of n ranks performs this collective.

    `size` is the number of bytes of the first tensor of the call.
    """
    if name in ("irecv", "recv"):
        return 0
    if name in ("gather", "scatter"):
        return (n - 1) * size
    if name in ("all_reduce", "all_reduce_coalesced"):
        return 2 * (n - 1) / n * size
    if name.startswith("reduce_scatter") or name in ("all_gather", "all_to_all"):
        return (n - 1) * size  # the first tensor is one of n parts
    if name.startswith(("all_gather", "all_to_all")):
        return (n - 1) / n * size
    return size


def group_scores(group: Any) -> dict[str, float]:
    """Return the scores of a `graders.protocol.Group`, under the names of the scores."""
    found: dict[str, float] = {}
    calls = [
        [call for call in rank.calls if call.phase and not call.name.endswith("recv")]
        for rank in group.ranks
    ]
    # the number of bytes of an object is unknown
    has_objects = any("object" in call.name for rank in calls for call in rank)
    if any(calls) and not has_objects:
        found["messages"] = max(map(len, calls))
        found["bytes sent"] = round(max(sum(call.sent for call in rank) for rank in calls))
    for reported in group.facts("scores"):
        for name, value in (reported or {}).items():
            found[name] = max(value, found.get(name, 0))
    if schedule := schedule_of(group):
        found["bubble percent"] = bubble(schedule)
    return found


# --- the schedule of a pipeline -----------------------------------------------------------


def schedule_of(group: Any) -> list[list[str]]:
    """Return the events of each stage whose rank has reported its events."""
    return [events for events in group.facts("schedule") if events]


def one_f_one_b(p: int, m: int) -> list[list[str]]:
    """Return the 1F1B schedule of p stages and m micro-batches."""
    orders = []
    for stage in range(p):
        forwards, backwards = ([f"{letter}{k}" for k in range(m)] for letter in "FB")
        warm_up = min(p - stage, m) - 1
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        steady_state = [event for pair in pairs for event in pair]
        orders.append(forwards[:warm_up] + steady_state + backwards[m - warm_up :])
    return orders


Bar = tuple[int, str, int, int]  # stage, event, begin, end


def bars(schedule: Sequence[Sequence[str]]) -> list[Bar]:
    """Return when each event begins and ends.

    An event begins as soon as its stage is free and its input exists. Events that never begin,
    because stages wait for each other, are left out.
    """
    last, found = len(schedule) - 1, []
    # when each event ends, and when each stage has finished its last event
    event_ends = dict.fromkeys([(-1, f"F{k}") for k in range(len(schedule[0]))], 0)
    stage_ends: dict[int, int] = {}
    remaining = [list(events) for events in schedule]
    while ready := [
        (stage, events.pop(0), dependency)
        for stage, events in enumerate(remaining)
        if events and (dependency := _dependency(stage, events[0], last)) in event_ends
    ]:
        for stage, event, dependency in ready:
            begin = max(stage_ends.get(stage, 0), event_ends[dependency])
            stage_ends[stage] = event_ends[stage, event] = begin + COST[event[0]]
            found.append((stage, event, begin, stage_ends[stage]))
    return found


def _dependency(stage: int, event: str, last: int) -> tuple[int, str]:
    """Return the stage and the event that must end before this event can begin.

    `last` is the number of the last stage. Stage -1 stands for the inputs of the pipeline.
    """
    if event[0] == "F":
        return stage - 1, event
    return (stage, f"F{event[1:]}") if stage == last else (stage + 1, event)


def bubble(schedule: Sequence[Sequence[str]]) -> float:
    """Return the percentage of the total time of all stages in which a stage waits."""
    found = bars(schedule)
    work = sum(end - begin for _, _, begin, end in found)
    return round(100 - 100 * work / (len(schedule) * max(end for *_, end in found)), 1)


def draw(submission: Sequence[Sequence[str]]) -> str:
    """Return an SVG drawing of the learner's schedule, with the 1F1B schedule below it."""
    m = len({event for events in submission for event in events if event[0] == "F"}) or 1
    parts, top, right = [], 0, 0
    for name, schedule in (("yours", submission), ("1F1B", one_f_one_b(len(submission), m))):
        found = bars(schedule)
        missing = sum(map(len, schedule)) - len(found)
        result = f"{missing} events never begin" if missing else f"bubble {bubble(schedule)}%"
        parts.append(f'<text x="0" y="{top + 16}">{name}: {result}</text>')
        for stage in range(len(schedule)):
            y = top + TITLE_HEIGHT + stage * ROW_HEIGHT + 15
            parts.append(f'<text x="0" y="{y}">stage {stage}</text>')
        for stage, event, begin, end in found:
            x, y = NAME_WIDTH + begin * UNIT_WIDTH, top + TITLE_HEIGHT + stage * ROW_HEIGHT
            width = (end - begin) * UNIT_WIDTH
            parts.append(
                f'<rect class="{event[0]}" x="{x}" y="{y}" width="{width}" '
                f'height="{ROW_HEIGHT}"/>'
                f'<text class="on" x="{x + width / 2:g}" y="{y + 15}">{event[1:]}</text>'
            )
            right = max(right, x + width)
        top += TITLE_HEIGHT + len(schedule) * ROW_HEIGHT + TITLE_HEIGHT // 2
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
    """Return a report in TOML with the graded program and the scores of each step.

    `graded` contains for each lab ("program", its code, scores) or ("file", its name, scores).
    The keys of the scores are the numbers of the steps.
    """
    text = ["# check.py --report wrote this file. It is graded again before it is accepted."]
    for lab, (key, value, steps) in graded.items():
        quoted = value.replace("\\", "\\\\").replace('"' * 3, '\\"' * 3)
        value = f'"""\n{quoted}"""' if key == "program" else f'"{quoted}"'
        text += ["", f"[{lab}]"]
        for number, scores in steps.items():
            inner = ", ".join(f'"{name}" = {value}' for name, value in scores.items())
            text.append(f"step{number} = {{ {inner} }}")
        text.append(f"{key} = {value}")
    return "\n".join(text) + "\n"
