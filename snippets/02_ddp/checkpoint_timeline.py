"""A failure costs the work since the last checkpoint and the time of the restart.

The program draws one run of three ranks, with time from left to right: the ranks train, rank 0
writes checkpoints, rank 2 dies, and torchrun stops the other ranks and starts all three again.
They load the last whole checkpoint and repeat the lost work.

The formula for the mean cost of a failure is compared with a simulation that shares no code
with it: the simulation plays the run minute by minute, once for every minute in which the
failure can happen. In the table, look at the two columns that move in opposite directions.
"""

from typing import NamedTuple

RANKS = 3
WIDTH, LEFT, ROW, TOP = 760, 64, 42, 58
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


class Plan(NamedTuple):
    """How a run trains and saves. All times are in minutes."""

    work: int = 120  # training that the run needs
    interval: int = 30  # training between two checkpoints
    save: int = 2  # to write one checkpoint; the ranks wait meanwhile
    restart: int = 8  # from the failure until the ranks train again

    def without_failure(self) -> int:
        return self.work // self.interval * (self.interval + self.save)

    def mean_cost(self) -> float:
        """Mean delay by one failure: half of the time between two saves, and the restart."""
        return (self.interval + self.save) / 2 + self.restart


class Span(NamedTuple):
    """A part of the run that all ranks spend in the same way."""

    kind: str  # train, save, lost, restart or repeat
    start: float  # minutes since the start of the run
    end: float


def timeline(plan: Plan, failure: float) -> list[Span]:
    """The run as spans, computed from the last save before a failure during training."""
    saves, trained = divmod(failure, plan.interval + plan.save)
    assert 0 < trained < plan.interval, "the picture shows a failure during training"
    kinds = [("train", plan.interval), ("save", plan.save)] * int(saves)
    kinds += [("lost", trained), ("restart", plan.restart)]
    kinds += [("repeat", trained), ("train", plan.interval - trained), ("save", plan.save)]
    later = plan.work // plan.interval - int(saves) - 1
    kinds += [("train", plan.interval), ("save", plan.save)] * later
    spans, clock = [], 0.0
    for kind, minutes in kinds:
        spans.append(Span(kind, clock, clock + minutes))
        clock += minutes
    return spans


def simulate(plan: Plan, failure: float | None = None) -> float:
    """Play the run minute by minute; return the minute in which its last save is complete."""
    clock, done, saved, writing = 0.0, 0, 0, 0
    while saved < plan.work:
        if failure is not None and failure < clock + 1:
            clock, failure = failure + plan.restart, None  # the minute that began is lost, too
            done, writing = saved, 0  # a checkpoint that is half-written does not count
            continue
        clock += 1
        if done - saved < plan.interval:
            done += 1
        else:
            writing += 1
            if writing == plan.save:
                saved, writing = done, 0
    return clock


def delays(plan: Plan) -> list[float]:
    """How much later the run ends, for a failure in the middle of each of its minutes."""
    undisturbed = simulate(plan)
    assert undisturbed == plan.without_failure()
    return [simulate(plan, minute + 0.5) - undisturbed for minute in range(int(undisturbed))]


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def line(path: str, colour: str, arrow: bool = False) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{end}/>'


def draw(spans: list[Span]) -> str:
    """The picture as SVG: rank 0 is the lowest rank, next to the storage that it writes to."""
    scale = (WIDTH - LEFT - 8) / spans[-1].end
    bottom = TOP + RANKS * ROW - 8  # of the lowest rank
    storage, height = bottom + 34, bottom + 118

    def x(minute: float) -> float:
        return round(LEFT + minute * scale, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{GREEN}"/>'
        "</marker></defs>",
    ]
    for rank in range(RANKS):
        parts.append(
            caption(2, TOP + (RANKS - 1 - rank) * ROW + 22, f"rank {rank}", INK, "start")
        )
    parts.append(caption(2, storage + 20, "storage", INK, "start"))

    names = {"train": ("train", BLUE), "lost": ("lost", ORANGE), "repeat": ("repeat", ORANGE)}
    number, right = 0, 0.0  # of the last checkpoint, and the right edge of its box
    for span in spans:
        width = round(x(span.end) - x(span.start), 1)
        minutes = f"{span.end - span.start:.0f} min"
        if span.kind == "restart":
            crash, middle = x(span.start), TOP + (RANKS * ROW - 8) / 2
            parts.append(box(crash, TOP, width, RANKS * ROW - 8, "", VIOLET))
            turned = f'transform="rotate(-90 {crash + width / 2 + 5} {middle})"'
            label = caption(crash + width / 2 + 5, middle, f"restart, {minutes}", VIOLET)
            parts.append(label.replace("<text", f"<text {turned}"))
            parts.append(line(f"M{crash - 7} {TOP + 10} l14 14 m0 -14 l-14 14", ORANGE))
            words = "rank 2 dies: torchrun stops ranks 0 and 1 and starts all three again"
            parts.append(caption(crash, 18, words))
            parts.append(line(f"M{crash} 24 V{TOP + 8}", MUTED))
            loads = f"M{right} {storage + 15} H{x(span.end)} V{bottom + 4}"
            parts.append(line(loads, GREEN, arrow=True))
            words = "all ranks load it"
            parts.append(caption(right + 6, storage + 32, words, GREEN, "start"))
            continue
        if span.kind == "save":
            number += 1
            parts.append(box(x(span.start), bottom - ROW + 8, width, ROW - 8, "", GREEN))
            middle = x((span.start + span.end) / 2)
            parts.append(line(f"M{middle} {bottom} V{storage - 2}", GREEN, arrow=True))
            right = min(middle + 47, WIDTH - 1)
            parts.append(box(right - 94, storage, 94, 30, f"checkpoint {number}", GREEN))
            continue
        words, colour = names[span.kind]
        if span.kind != "train":
            parts.append(
                caption(x((span.start + span.end) / 2), TOP - 10, f"{words}: {minutes}", ORANGE)
            )
        for row in range(RANKS):
            parts.append(box(x(span.start), TOP + row * ROW, width, ROW - 8, words, colour))

    axis = storage + 52
    parts.append(caption(2, axis + 20, "minute", INK, "start"))
    parts.append(line(f"M{LEFT} {axis} H{x(spans[-1].end)}", MUTED))
    for minute in range(0, int(spans[-1].end) + 1, 30):
        parts.append(line(f"M{x(minute)} {axis} v5", MUTED))
        parts.append(caption(x(minute), axis + 20, str(minute), MUTED))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    plan, failure = Plan(), 84
    spans = timeline(plan, failure)
    end, undisturbed = spans[-1].end, plan.without_failure()
    assert end == simulate(plan, failure)
    lost = sum(span.end - span.start for span in spans if span.kind == "lost")
    assert end - undisturbed == lost + plan.restart
    print(f"without a failure: {undisturbed} min, of which {plan.work} min are training")
    print(
        f"failure at minute {failure}: {lost:.0f} min are lost, the restart takes "
        f"{plan.restart} min, and the run takes {end:.0f} min"
    )

    print("\n            without a failure   delay by one failure, all times in min")
    print("interval    time for saves      least   most   mean   formula")
    before = None
    for interval in (10, 30, 60):
        each = Plan(interval=interval)
        found = delays(each)
        mean, saves = sum(found) / len(found), each.without_failure() - each.work
        assert mean == each.mean_cost()
        print(
            f"{interval:>8}{saves:>18}{min(found):>15}{max(found):>7}{mean:>7}"
            f"{each.mean_cost():>10}"
        )
        assert before is None or (saves < before[0] and mean > before[1])
        before = saves, mean

    with open("checkpoint_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw(spans))
    print(f"\ndrew checkpoint_timeline.svg: {RANKS} ranks, one failure")


if __name__ == "__main__":
    main()
