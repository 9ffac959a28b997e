"""Fit the planner's constants to measured runs, and predict what was not fitted.

    python fit.py measured.csv

The constants stand in constants.toml. Those of time are moved in turn, up and down, as long as
the mean error falls; an error counts for half at most, since a run that went wrong says little.
Those of memory are the best of a grid. Then everything is fitted again on all models but one,
and on all numbers of nodes but one, and what was left out is predicted.
"""

import copy
import itertools
import math
import statistics
import sys
from collections.abc import Callable

from memory import with_unseen
from plan import (
    CONSTANTS,
    SEQUENCE,
    Row,
    memory_error,
    memory_of,
    predict,
    read_rows,
    score,
    stop,
    the_gpu,
    the_models,
    why_not,
)
from step_time import step_time

MODELS = the_models()
GPU = the_gpu("h100")
FITTED = [name for name in CONSTANTS["time"] if name != "attention"]
SHARES = ("products", "memory", "link", "network")  # at most 1
GRID = {
    "unseen": (0.04, 0.05, 0.06),
    "workspaces": (0.05, 0.1, 0.15),
    "in_flight": (45, 50, 55),
}


# --8<-- [start:fit]
def time_loss(rows: list[Row], constants: dict) -> float:
    errors = []
    for row in rows:
        step = step_time(MODELS[row.model], row.layout, 4096, GPU, constants["time"])
        errors.append(min(0.5, abs(math.log(step.seconds / row.seconds))))
    return statistics.mean(errors)


def memory_loss(rows: list[Row], constants: dict) -> float:
    c, errors = constants["memory"], []
    for row in rows:
        args = MODELS[row.model], row.layout, SEQUENCE, GPU, c, row.predicted, row.found
        row.planned = memory_of(*args)
        errors.append(min(0.3, abs(memory_error(row))))
    return statistics.mean(errors)


def fits_loss(rows: list[Row], constants: dict) -> float:
    """Wrong answers to whether a layout fits. To call one impossible that ran is three times as
    wrong as the opposite: one that failed may have failed for another reason.
    """
    room = constants["memory"]["room"] * GPU.memory
    wrong = 0
    for row in rows:
        allocated = max(allocated for _, allocated in row.found.values())
        needed = with_unseen(allocated, constants["memory"])
        fits = needed <= room and not why_not(MODELS[row.model], row.layout, SEQUENCE)
        wrong += (fits != row.ran) * (3 if row.ran else 1)
    return wrong / len(rows)


def fit(rows: list[Row], start: dict) -> dict:
    best = copy.deepcopy(start)
    steady = [row for row in rows if row.ran and row.consistent]
    loss = time_loss(steady, best)
    for factor in (1.2, 1.05):
        moved = True
        while moved:
            moved = False
            for name, by in itertools.product(FITTED, (factor, 1 / factor)):
                trial = copy.deepcopy(best)
                trial["time"][name] *= by
                if name in SHARES and trial["time"][name] > 1:
                    continue
                if (found := time_loss(steady, trial)) < loss - 1e-5:
                    best, loss, moved = trial, found, True
    ran = [row for row in rows if row.ran]
    predict(ran, MODELS, GPU, best)
    best["memory"] |= least(memory_loss, ran, best, GRID)
    rooms = {"room": [n / 100 for n in range(76, 90)]}
    best["memory"] |= least(fits_loss, rows, best, rooms)
    return best


def least(loss: Callable, rows: list[Row], start: dict, grid: dict) -> dict:
    trials = [
        dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())
    ]
    return min(
        trials, key=lambda trial: loss(rows, start | {"memory": start["memory"] | trial})
    )


# --8<-- [end:fit]


def left_out(rows: list[Row], what: str, start: dict) -> None:
    for value in sorted({getattr(row, what) for row in rows}):
        rest = [row for row in rows if getattr(row, what) != value]
        predict([row for row in rows if row not in rest], MODELS, GPU, fit(rest, start))
    print(f"each {what} predicted by constants fitted on the others")
    score(rows, whole=False)


def main() -> None:
    if len(sys.argv) != 2:
        stop("fit.py", "give it one file of measured rows, such as measured.csv")
    rows = read_rows(sys.argv[1])
    predict(rows, MODELS, GPU, CONSTANTS)
    # never from where they are now: a fit that stays in its place would prove nothing, and
    # constants that were fitted on the rows left out would know them
    start = {"memory": CONSTANTS["memory"], "time": dict.fromkeys(SHARES, 0.7)}
    start["time"] |= dict.fromkeys(("launch", "launch_between"), 5e-3)
    start["time"] |= {
        "hop": 1e-4,
        "stall": 1.0,
        "fixed": 0.1,
        "attention": CONSTANTS["time"]["attention"],
    }
    found = fit(rows, start)
    for part, values in found.items():
        print(part + ": " + ", ".join(f"{name} {value:.3g}" for name, value in values.items()))
    before, after = (time_loss([r for r in rows if r.ran], c) for c in (start, found))
    print(f"mean error of time, each at most 0.5: {before:.3f} before, {after:.3f} after")
    assert after < 0.8 * before
    for what in ("model", "nodes"):
        left_out(rows, what, start)


if __name__ == "__main__":
    main()
