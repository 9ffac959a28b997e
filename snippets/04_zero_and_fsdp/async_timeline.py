"""An asynchronous save stops training for the copy to host memory, and sometimes for the disk.

The program draws two runs of the same training, with time from left to right. In the
synchronous run, training stops for the copy and for the writing. In the asynchronous run, it
stops for the copy (staging), and a thread writes while the next steps run. If the writing is
not finished at the next save, then training waits for it.

A formula gives the time that a save takes from training. The program compares it with a
simulation that plays the run second by second and shares no code with the formula. In the
table, find the smallest number of steps between two saves for which the asynchronous run
loses only the time of the copy. The program draws async_timeline.svg.
"""

from typing import NamedTuple

WIDTH, LEFT, ROW, TOP = 760, 112, 40, 40
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


class Plan(NamedTuple):
    """How a run trains and saves. All times are in seconds."""

    every: int = 4  # steps between two saves
    step: int = 1
    copy: int = 2  # from the GPU to host memory
    write: int = 6  # from host memory to the storage

    def lost(self, asynchronous: bool) -> int:
        """The time for which one save stops training."""
        if not asynchronous:
            return self.copy + self.write
        return self.copy + max(0, self.write - self.every * self.step)


class Interval(NamedTuple):
    """A part of the run, which all ranks spend in the same way."""

    kind: str  # step, copy, write or wait
    start: int
    end: int


def simulate(plan: Plan, saves: int, asynchronous: bool) -> list[Interval]:
    """Play the run second by second until all saves are written."""
    clock, steps, done, spans = 0, 0, 0, []
    writing_until = 0  # the time at which the thread finishes writing

    def spend(kind: str, seconds: int) -> None:
        nonlocal clock
        spans.append(Interval(kind, clock, clock + seconds))
        clock += seconds

    while done < saves:
        spend("step", plan.step)
        steps += 1
        if steps % plan.every:
            continue
        begin = clock
        while clock < writing_until:  # result() of the previous save
            clock += 1
        if clock > begin:
            spans.append(Interval("wait", begin, clock))
        spend("copy", plan.copy)
        if asynchronous:
            writing_until = clock + plan.write
            spans.append(Interval("write", clock, writing_until))
        else:
            spend("write", plan.write)
        done += 1
    return spans


def stopped(spans: list[Interval], asynchronous: bool) -> int:
    """The time in which training stopped. The writing of the thread does not count."""
    kinds = {"copy", "wait"} if asynchronous else {"copy", "write"}
    return sum(span.end - span.start for span in spans if span.kind in kinds)


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def draw(synchronous: list[Interval], asynchronous: list[Interval], seconds: int) -> str:
    """The picture as SVG: the synchronous run above, the asynchronous run below."""
    scale = (WIDTH - LEFT - 4) / seconds
    looks = {
        "step": ("", BLUE), "copy": ("copy", VIOLET), "write": ("write", GREEN),
        "wait": ("wait", ORANGE),
    }  # fmt: skip
    rows = {"training": TOP, "training ": TOP + 2 * ROW + 22, "thread": TOP + 3 * ROW + 22}
    height = TOP + 4 * ROW + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(2, TOP - 14, "synchronous: dcp.save", INK, "start"),
        caption(2, TOP + 2 * ROW + 8, "asynchronous: dcp.async_save", INK, "start"),
    ]
    for name, y in rows.items():
        parts.append(caption(2, y + ROW / 2 + 1, name.strip(), MUTED, "start"))
    for spans, first in ((synchronous, "training"), (asynchronous, "training ")):
        number = 0
        for span in spans:
            number += span.kind == "step"
            if span.start >= seconds:
                continue
            words, colour = looks[span.kind]
            in_thread = span.kind == "write" and first == "training "
            y = rows["thread" if in_thread else first]
            x, width = LEFT + span.start * scale, (min(span.end, seconds) - span.start) * scale
            words = words or str(number)
            if span.kind == "write" and span.end <= seconds:
                words = f"write, {span.end - span.start} s"
            parts.append(box(round(x, 1), y, round(width, 1), ROW - 8, words, colour))
    axis = height - 30
    parts.append(f'<path d="M{LEFT} {axis} H{WIDTH - 4}" stroke="{MUTED}"/>')
    for second in range(0, seconds + 1, 4):
        x = round(LEFT + second * scale, 1)
        anchor = "end" if second == seconds else "middle"
        parts.append(f'<path d="M{x} {axis} v5" stroke="{MUTED}"/>')
        parts.append(caption(x, axis + 20, str(second), MUTED, anchor))
    parts.append(caption(2, axis + 20, "second", INK, "start"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    saves = 20
    print("a step takes 1 s, a copy to host memory takes 2 s, writing takes 6 s")
    print("steps between     training stops for each save, in s      part of the run")
    print("two saves         synchronous   asynchronous   formula    that is lost")
    for every in (2, 4, 6, 12):
        plan, found = Plan(every=every), {}
        for asynchronous in (False, True):
            spans = simulate(plan, saves, asynchronous)
            found[asynchronous] = total = stopped(spans, asynchronous)
            first = plan.copy if asynchronous else plan.lost(False)  # no earlier save
            assert total == first + (saves - 1) * plan.lost(asynchronous)
            trained = sum(span.end - span.start for span in spans if span.kind == "step")
            assert trained == saves * every * plan.step  # both runs train equally long
        later = (found[True] - plan.copy) // (saves - 1)  # for each save after the first
        parts = [lost / (lost + every) for lost in (plan.lost(False), later)]
        print(
            f"{every:>8}{plan.lost(False):>20}{later:>15}{plan.lost(True):>11}"
            f"{parts[0]:>11.0%} and {parts[1]:.0%}"
        )
    plan = Plan()
    runs = [simulate(plan, 4, asynchronous) for asynchronous in (False, True)]
    counts = [sum(s.kind == "step" and s.end <= 24 for s in spans) for spans in runs]
    assert counts[0] < counts[1]
    print(f"4 steps between two saves: {counts[0]} and {counts[1]} steps in the first 24 s")
    with open("async_timeline.svg", "w", encoding="utf-8") as file:
        file.write(draw(*runs, seconds=24))
    print("drew async_timeline.svg: a save after every 4 steps")


if __name__ == "__main__":
    main()
