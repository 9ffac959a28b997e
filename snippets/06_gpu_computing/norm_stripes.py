"""A picture of the sums over rows in the backward of a norm, which always have the same order.

Each program adds up every P-th row in registers and writes one row. One small sum over the P
rows follows. If all programs added their rows to one result with atomics instead, the order of
the additions would depend on which program comes first, and so would the last bits of the
result. The program adds the same numbers in both ways and counts the different results.

Plain Python writes the SVG, so the program runs without any package.
"""

import random
from collections.abc import Sequence
from fractions import Fraction

ROWS, WIDTH, PROGRAMS = 12, 8, 4
INK, MUTED = "#1f2937", "#52525b"
COLOURS = ("#0b6e99", "#c2410c", "#15803d", "#7c3aed")
Rows = list[list[float]] | dict[int, list[float]]


# --8<-- [start:sums]
def in_order(x: Rows, order: Sequence[int]) -> list[float]:
    """Sums over the rows of x, which are added to one result in this order."""
    result = [0.0] * WIDTH
    for row in order:
        result = [r + v for r, v in zip(result, x[row], strict=True)]
    return result


def by_programs(x: Rows, finished: list[int]) -> dict[int, list[float]]:
    """One row of sums for each program. The programs finish in any order."""
    return {program: in_order(x, range(program, len(x), PROGRAMS)) for program in finished}


# --8<-- [end:sums]


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def strip(x: float, y: float, width: float, colour: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="15" fill="{colour}" '
        f'fill-opacity="0.3" stroke="{colour}"/>'
    )


def tie(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    return (
        f'<path d="M{start[0]:g} {start[1]:g} L{end[0]:g} {end[1]:g}" stroke="{colour}" '
        'fill="none"/>'
    )


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 250" '
        'font-family="system-ui, sans-serif" font-size="14">',
        words(4, 18, f"rows of dy · x̂, {PROGRAMS} programs", INK, "start"),
        words(290, 18, "one row per program", INK, "start"),
        words(552, 18, "one small sum", INK, "start"),
    ]
    for row in range(ROWS):
        program = row % PROGRAMS
        y = 32 + 17 * row
        parts.append(strip(90, y, 130, COLOURS[program]))
        parts.append(words(4, y + 12, f"program {program}", COLOURS[program], "start"))
        parts.append(tie((220, y + 7.5), (290, 98 + 28 * program), COLOURS[program]))
    for program in range(PROGRAMS):
        parts.append(strip(290, 90 + 28 * program, 130, COLOURS[program]))
        parts.append(tie((420, 98 + 28 * program), (552, 140), COLOURS[program]))
    parts.append(strip(552, 132, 130, INK))
    parts.append(words(617, 168, "dw"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    generator = random.Random(0)
    x = [[generator.gauss(0, 1) for _ in range(WIDTH)] for _ in range(ROWS)]
    exact = [float(sum(map(Fraction, column))) for column in zip(*x, strict=True)]
    stripes, as_finished, atomics = set(), set(), set()
    for _ in range(20):
        finished = generator.sample(range(PROGRAMS), PROGRAMS)
        order = generator.sample(range(ROWS), ROWS)
        partial = by_programs(x, finished)
        assert list(partial) == finished  # the programs ran in this order
        for results, sums in (
            (stripes, in_order(partial, range(PROGRAMS))),
            (as_finished, in_order(partial, finished)),
            (atomics, in_order(x, order)),
        ):
            assert all(abs(a - b) < 1e-14 for a, b in zip(sums, exact, strict=True))
            results.add(tuple(sums))
    assert len(stripes) == 1 < min(len(as_finished), len(atomics))
    print(f"20 runs with one row per program: {len(stripes)} result")
    print(f"20 runs with atomics: {len(atomics)} different results")
    with open("norm_stripes.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
