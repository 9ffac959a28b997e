"""The steps of the challenge: first the same numbers, and then one step for each medal."""

from typing import Any

import torch

from graders.dsl import (
    Condition,
    Lab,
    OperatorRecorder,
    at_most,
    import_late_parts,
    require,
    require_equal,
)

import_late_parts()
LAB = Lab()


@LAB.alone(
    1,
    "the same numbers",
    "codes, means and error of the slow step",
    "fast_step",
    crashes={"must match the size": "empty"},
)
def right(submission, reference, lesson):
    for n, k in ((257, 20), (40, 9)):
        draw = torch.Generator().manual_seed(0)
        x, codes = torch.randn(n, 8, generator=draw), torch.randn(k, 8, generator=draw)
        codes *= torch.linspace(0.2, 2, k)[:, None]
        codes[7], codes[-1] = 100.0, -100.0  # no row is near these
        truth, before = reference.slow_step(x, codes), (x.clone(), codes.clone())
        with OperatorRecorder() as recorder:
            found = submission.fast_step(x, codes)
        if n == 257:
            lesson.fact("scores", {"launches": len(recorder.operators)})
        kinds, true_kinds = kinds_of(found), kinds_of(truth)
        what = f"fast_step returns {', '.join(kinds)}; slow_step returns "
        what += ", ".join(true_kinds)
        require(kinds[:2] == true_kinds[:2] and len(kinds) == 3, what, "returned")
        nearest, new, error = found
        unchanged = torch.equal(x, before[0]) and torch.equal(codes, before[1])
        require_equal("x and codes are as before", unchanged, True, "changed")
        wrong = int((nearest != truth[0]).sum())
        fact = f"the number of rows, of {n}, that are assigned to a wrong code"
        require_equal(fact, wrong, 0, "nearest")
        for code in (7, k - 1):
            fact = f"the first number of code {code}, which has no rows"
            require_equal(fact, new[code, 0].item(), codes[code, 0].item(), "empty")
        difference = (new - truth[1]).abs().max().item()
        require_equal("largest difference of a new code", difference, at_most(1e-4), "means")
        relative = abs(float(error) / float(truth[2]) - 1)
        require_equal(
            "relative error of the mean squared distance", relative, at_most(1e-4), "error"
        )
        fact = "the number of elements of the largest new tensor"
        require_equal(fact, recorder.largest, at_most(n * k), "memory")
        codes *= 0.5
        _, new, _ = submission.fast_step(x, codes)
        difference = (new - reference.slow_step(x, codes)[1]).abs().max().item()
        fact = "largest difference of a new code, after the codes were halved in place"
        require_equal(fact, difference, at_most(1e-4), "kept")


def kinds_of(results: Any) -> list[str]:
    """Return the shape and the dtype of each result, in words."""
    if not isinstance(results, (tuple, list)):
        return ["None" if results is None else f"a {type(results).__name__}"]
    return [
        f"{list(each.shape)} of {str(each.dtype).removeprefix('torch.')}"
        if isinstance(each, torch.Tensor)
        else type(each).__name__
        for each in results
    ]


for number, (name, bound) in enumerate(LAB.finished.MEDALS.items(), 2):
    title = f"{name}: {bound:g} times as fast"

    @LAB.alone(number, title, "measured in turns, by processor time", "fast_step", needs=(1,))
    def medal(submission, reference, lesson, name=name, bound=bound):
        speedup = reference.ratio(reference.slow_step, submission.fast_step)
        enough = Condition(f"{bound:g} or more", lambda ratio: ratio >= bound)
        require_equal("times as fast", speedup, enough, name)
