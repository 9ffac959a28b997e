"""The challenge: the same numbers first, then one step for each medal."""

import torch
from graders._compare import Watch, below, finished, hold, import_late_parts, that
from graders.runner import Lesson, Step

HINTS = {
    "nearest": "The nearest codes are others: |c|² belongs to the comparison, |x|² does not.",
    "means": "The new codes are not the means of their rows.",
    "empty": "A code without rows must stay where it is, and not become NaN or zero.",
    "error": "The mean squared distance is wrong: a term that does not move the minimum counts "
    "in the error.",
    "changed": "x or codes of the caller were changed.",
    "memory": "A tensor of n·k·d numbers was made: let a matrix product add up over d.",
    "bronze": "Not yet twice as fast. Where does the time go? Profile: a Python loop over the "
    "rows launches thousands of small operators, for the error say.",
    "silver": "Not yet five times as fast: a loop over the codes launches hundreds of small "
    "operators. index_add_ adds all rows to their codes at once.",
    "gold": "Not yet ten times as fast. If no loop is left, count the operators: is anything "
    "computed twice, copied, or larger than it must be?",
}  # fmt: skip
OURS = finished("challenge")
import_late_parts()


def probe_same(lesson: Lesson) -> None:
    step = lesson.module.fast_step
    draw = torch.Generator().manual_seed(0)
    x, codes = torch.randn(257, 8, generator=draw), torch.randn(20, 8, generator=draw)
    codes *= torch.linspace(0.2, 2, 20)[:, None]
    codes[7] = 100.0  # nobody is near it
    truth, before = OURS.slow_step(x, codes), (x.clone(), codes.clone())
    with Watch() as watch:
        nearest, new, error = step(x, codes)
    lesson.fact("x and codes are as before",
                torch.equal(x, before[0]) and torch.equal(codes, before[1]))  # fmt: skip
    lesson.fact("rows whose nearest code is another", int((nearest != truth[0]).sum()))
    lesson.fact("the code without rows", new[7, 0].item())
    lesson.fact("largest distance of a new code", (new - truth[1]).abs().max().item())
    lesson.fact("relative error of the distance", abs(float(error) / float(truth[2]) - 1))
    lesson.fact("the most numbers in one tensor", watch.largest)


def probe_speed(lesson: Lesson) -> None:
    lesson.fact("times as fast", OURS.ratio(OURS.slow_step, lesson.module.fast_step))


def medal(number: int, name: str) -> Step:
    bound = OURS.MEDALS[name]
    check = ("times as fast", that(f"{bound:g} or more", lambda r: r >= bound), name)
    return Step(
        number, f"{name}: {bound:g} times as fast", "measured in turns, by processor time",
        probe_speed, hold(HINTS, check), ("fast_step",), (1,), needs=(1,), joins=False,
    )  # fmt: skip


STEPS = [
    Step(
        1, "the same numbers", "codes, means and error of the slow step", probe_same,
        hold(
            HINTS,
            ("x and codes are as before", True, "changed"),
            ("rows whose nearest code is another", 0, "nearest"),
            ("the code without rows", 100.0, "empty"),
            ("largest distance of a new code", below(1e-4), "means"),
            ("relative error of the distance", below(1e-4), "error"),
            ("the most numbers in one tensor", below(257 * 20), "memory"),
        ),
        ("fast_step",), (1,), joins=False,
    ),
    *(medal(number, name) for number, name in enumerate(OURS.MEDALS, 2)),
]  # fmt: skip
