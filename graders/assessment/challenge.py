"""The challenge: the same numbers first, then one step for each medal."""

import torch

from graders.tools import Lab, Passes, Watch, at_most, check, import_late_parts

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
import_late_parts()
LAB = Lab(HINTS)


@LAB.alone(1, "the same numbers", "codes, means and error of the slow step", "fast_step")
def right(theirs, ours, lesson):
    draw = torch.Generator().manual_seed(0)
    x, codes = torch.randn(257, 8, generator=draw), torch.randn(20, 8, generator=draw)
    codes *= torch.linspace(0.2, 2, 20)[:, None]
    codes[7] = 100.0  # nobody is near it
    truth, before = ours.slow_step(x, codes), (x.clone(), codes.clone())
    with Watch() as watch:
        nearest, new, error = theirs.fast_step(x, codes)
    lesson.fact("scores", {"launches": len(watch.launched)})
    kept = torch.equal(x, before[0]) and torch.equal(codes, before[1])
    check("x and codes are as before", kept, True, "changed")
    others = int((nearest != truth[0]).sum())
    check("rows whose nearest code is another", others, 0, "nearest")
    check("the code without rows", new[7, 0].item(), 100.0, "empty")
    apart = (new - truth[1]).abs().max().item()
    check("largest distance of a new code", apart, at_most(1e-4), "means")
    relative = abs(float(error) / float(truth[2]) - 1)
    check("relative error of the distance", relative, at_most(1e-4), "error")
    check("the most numbers in one tensor", watch.largest, at_most(257 * 20), "memory")


for number, (name, bound) in enumerate(LAB.finished.MEDALS.items(), 2):
    title = f"{name}: {bound:g} times as fast"

    @LAB.alone(number, title, "measured in turns, by processor time", "fast_step", needs=(1,))
    def medal(theirs, ours, lesson, name=name, bound=bound):
        wanted = Passes(f"{bound:g} or more", lambda ratio: ratio >= bound)
        check("times as fast", ours.ratio(ours.slow_step, theirs.fast_step), wanted, name)
