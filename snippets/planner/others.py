"""Memory by two calculators in wide use, and by the planner, beside what was measured.

    python others.py measured.csv

Re-derived from what the calculators compute, with the settings that suit the runs best: no
scores kept (fused attention), sequence parallelism or partitioned activations, ZeRO's stage.
EleutherAI's (cookbook, calc_transformer_mem.py at 069ae2ef) divides parameters by TP and PP,
and neither gradients nor activations by PP. The Ultra-Scale Playbook's widget (its page at
924e4d0b) knows no PP, cuts activations by TP and nothing else, and counts a plain MLP of 4 h.
So each is judged on all layouts, and on those that it describes.
"""

import statistics
import sys
from collections.abc import Callable

from memory import Layout
from plan import GIB, SEQUENCE, Row, predicted_rows, stop, the_models
from transformer import Shape


# --8<-- [start:others]
def eleuther(shape: Shape, layout: Layout) -> float:
    """Bytes of a GPU, with ZeRO's bucket of 5e8 elements."""
    h, tokens = shape.hidden, layout.micro_batch * SEQUENCE
    held = 2 * shape.vocabulary * h + h * SEQUENCE + 8 * h * shape.layers + 2 * h
    held += shape.layers * h * (4 * h + 3 * shape.ffn)
    state = 2 * held / (layout.tp * layout.pp) + 4 * held
    state += 12 * held / (layout.gpus if layout.zero else 1) + 1e9 * bool(layout.zero)
    return state + 34 * tokens * h * shape.layers / layout.tp


def widget(shape: Shape, layout: Layout) -> float:
    """Bytes of a GPU; gradients in bf16."""
    h, tokens = shape.hidden, layout.micro_batch * SEQUENCE
    held = h * (shape.vocabulary + SEQUENCE) + shape.layers * (12 * h * h + 13 * h) + 2 * h
    state = 4 * held + 12 * held / (layout.dp if layout.zero else 1)
    layer = tokens * (11 * h + (3 * h + 8 * shape.ffn) + 4 * h)
    ends = tokens * (5 * h + 4 * shape.vocabulary)
    return state + (shape.layers * layer + ends) / layout.tp


# --8<-- [end:others]


def main() -> None:
    if len(sys.argv) != 2:
        stop("others.py", "give it one file of measured rows, such as measured.csv")
    rows, models = predicted_rows(sys.argv[1]), the_models()
    theirs: dict[str, Callable[[Row], float]] = {
        "EleutherAI": lambda row: eleuther(models[row.model], row.layout),
        "the Playbook": lambda row: widget(models[row.model], row.layout),
        "this planner": lambda row: row.planned.first,
    }
    ran = [row for row in rows if row.ran]
    for what, some in (
        ("all layouts", ran),
        ("no pipeline", [row for row in ran if row.layout.pp == 1]),
        ("neither PP nor TP", [row for row in ran if row.layout.pp == row.layout.tp == 1]),
    ):
        print(f"{what}, {len(some)} measured: median error, within 12%")
        medians = []
        for name, formula in theirs.items():
            errors = [abs(formula(row) / GIB / row.memory - 1) for row in some]
            near = sum(error <= 0.12 for error in errors) / len(errors)
            medians.append(statistics.median(errors))
            print(f"  {name:13} {medians[-1]:6.1%} {near:6.1%}")
        assert min(medians) == medians[-1]


if __name__ == "__main__":
    main()
