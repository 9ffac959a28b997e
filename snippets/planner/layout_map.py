"""For each TP and each number of pipeline stages: the fastest layout that fits, and its time.

    python layout_map.py --model llama-3-8b --gpus 8 --batch 512K

The program uses the layouts, the times and the memory of plan.py. If no layout of a cell fits,
the cell contains the layout whose first stage needs the least memory by the closed formulas,
and an exclamation mark. Without arguments, the program also compares the fastest cell with the
first layout of the planner. The page "Parallelism planner" draws the same numbers.
"""

import argparse
import sys

from memory import closed_form
from plan import (
    CONSTANTS,
    GIB,
    Candidate,
    called,
    number,
    search,
    the_gpu,
    the_model,
    timed_layouts,
    weigh,
)
from step_time import Gpu
from transformer import Shape


# --8<-- [start:map]
def layout_map(shape: Shape, gpus: int, sequence: int, batch: int, gpu: Gpu) -> list[dict]:
    """One cell for each TP and PP that has a layout."""
    room = CONSTANTS["memory"]["room"] * gpu.memory
    best: dict[tuple[int, int], Candidate] = {}  # the fastest layout that fits
    # the layout that needs the least memory by the formulas, and this memory
    lean: dict[tuple[int, int], tuple[float, Candidate]] = {}
    for each in timed_layouts(shape, gpus, sequence, batch, gpu):  # the fastest is first
        cell = each.layout.tp, each.layout.pp
        if cell in best:
            continue
        least = sum(closed_form(shape, each.layout, sequence, 0).values())
        if cell not in lean or least < lean[cell][0]:
            lean[cell] = least, each
        if least <= room:  # the replay never needs less than the formulas
            each.memory = weigh(shape, each.layout, sequence, gpu, each.step)
            if each.memory.needed <= room:
                best[cell] = each
    cells = []
    for tp, pp in sorted(lean):
        each = best.get((tp, pp)) or lean[tp, pp][1]
        memory = each.memory or weigh(shape, each.layout, sequence, gpu, each.step)
        made = {"tp": tp, "pp": pp, "fits": (tp, pp) in best, "name": called(each.layout)}
        made |= {
            "time": f"{each.step.seconds:.2f} s",
            "needs": f"{memory.needed / GIB:.1f} GiB",
        }
        cells.append(made)
    return cells


# --8<-- [end:map]


def seconds(cell: dict) -> float:
    return float(cell["time"].split()[0])


def check(cells: list[dict], *given: int | Shape | Gpu) -> None:
    """The fastest cell that fits contains the first layout of the planner."""
    fit, _, _ = search(*given, 1)
    fastest = min((cell for cell in cells if cell["fits"]), key=seconds)
    assert fastest["name"] == called(fit[0].layout), fastest
    # a cell fits if its memory is below the limit
    room = CONSTANTS["memory"]["room"] * given[-1].memory / GIB
    for cell in cells:
        assert cell["fits"] == (float(cell["needs"].split()[0]) <= room), cell
    print(f"fastest that fits: {fastest['name']}, as in plan.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3-70b")
    parser.add_argument("--gpus", type=int, default=256)
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", default="4M", help="tokens of a step")
    args = parser.parse_args()
    batch = int(number(args.batch, "--batch")) // args.sequence
    given = the_model(args.model), args.gpus, args.sequence, batch, the_gpu(args.gpu)
    cells = layout_map(*given)
    if not cells:
        sys.exit("no layout shares the sequences evenly over the GPUs")
    stages = sorted({cell["pp"] for cell in cells})
    print("seconds of a step; ! does not fit")
    print("       " + "".join(f"{f'PP {pp}':>9}" for pp in stages))
    for tp in sorted({cell["tp"] for cell in cells}):
        row = {cell["pp"]: cell for cell in cells if cell["tp"] == tp}
        texts = [
            f"{seconds(row[pp]):.2f}{' ' if row[pp]['fits'] else '!'}" if pp in row else ""
            for pp in stages
        ]
        print(f"TP {tp:<4}" + "".join(f"{text:>9}" for text in texts).rstrip())
    if len(sys.argv) == 1:
        check(cells, *given)


if __name__ == "__main__":
    main()
