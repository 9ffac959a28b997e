"""A picture of an MLP that is cut over two ranks: A by columns, B by rows.

Each row of the picture is a rank. A rank has the whole input X, half of the columns of A and
half of the rows of B. It computes half of the hidden layer, and then one term of the
result. The ranks communicate only at the end: an all-reduce adds the two terms.

The sizes in the picture are those of a real product, and the program checks that the sum of the
terms is the result of the whole MLP. Draws mlp_cut.svg.
"""

import torch
from torch.nn.functional import gelu

RANKS, TOKENS, HIDDEN = 2, 6, 4  # X is 6 x 4, A is 4 x 16 and B is 16 x 4
CELL, LEFT, TOP, ROW = 11, 70, 66, 236
INK, MUTED = "#1f2937", "#52525b"
COLOURS = "#0b6e99", "#c2410c"


def centred(x: float, y: float, words: str, colour: str = INK, size: int = 14) -> str:
    middle = f'text-anchor="middle" font-size="{size}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {middle}>{words}</text>'


def matrix(
    x: float, y: float, shape: tuple[int, int], part: tuple[slice, slice], colour: str
) -> str:
    """The outline of a matrix [rows, columns], and the part of it that a rank has, filled."""
    height, width = (CELL * n for n in shape)
    (top, bottom, _), (left, right, _) = (
        s.indices(n) for s, n in zip(part, shape, strict=True)
    )
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="none" '
        f'stroke="{MUTED}" stroke-dasharray="3 3"/>'
        f'<rect x="{x + CELL * left}" y="{y + CELL * top}" width="{CELL * (right - left)}" '
        f'height="{CELL * (bottom - top)}" fill="{colour}" fill-opacity="0.75" '
        f'stroke="{colour}"/>'
    )


def draw(shapes: dict[str, tuple[int, int]]) -> str:
    everything = slice(None)
    wide = shapes["A"][1]
    places, x = {}, LEFT
    for name in ("X", "A", "U", "B", "Y"):
        places[name] = x
        x += CELL * shapes[name][1] + (70 if name == "Y" else 40)
    box, result = x - 34, x + 96
    width, height = result + CELL * HIDDEN + 20, TOP + RANKS * ROW - 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">'
    ]
    titles = {
        "X": "X", "A": "A, cut by columns", "U": "GeLU(X A)", "B": "B, by rows",
        "Y": "a term",
    }  # fmt: skip
    for name, words in titles.items():
        middle = places[name] + CELL * shapes[name][1] / 2
        parts.append(centred(middle, 24, words))
        parts.append(centred(middle, 44, f"{shapes[name][0]} × {shapes[name][1]}", MUTED, 12))
    for rank in range(RANKS):
        centre = TOP + rank * ROW + CELL * wide / 2
        own = slice(rank * wide // RANKS, (rank + 1) * wide // RANKS)
        held = {
            "X": (everything, everything), "A": (everything, own), "U": (everything, own),
            "B": (own, everything), "Y": (everything, everything),
        }  # fmt: skip
        parts.append(centred(30, centre + 5, f"rank {rank}"))
        for name, part in held.items():
            top = centre - CELL * shapes[name][0] / 2
            colour = MUTED if name == "X" else COLOURS[rank]
            parts.append(matrix(places[name], top, shapes[name], part, colour))
        for name, sign in (("A", "×"), ("U", "→"), ("B", "×"), ("Y", "=")):
            parts.append(centred(places[name] - 20, centre + 6, sign, INK, 18))
        parts.append(
            f'<path d="M{places["Y"] + CELL * HIDDEN + 8} {centre} H{box}" stroke="{INK}"/>'
            f'<path d="M{box + 96} {centre} H{result - 6}" stroke="{INK}"/>'
        )
        parts.append(matrix(result, centre - CELL * 3, shapes["Y"], held["Y"], "#6d28d9"))
    span = (RANKS - 1) * ROW + CELL * 6 + 40
    begin = TOP + CELL * wide / 2 - CELL * 3 - 20
    parts.append(
        f'<rect x="{box}" y="{begin}" width="96" height="{span}" rx="6" fill="#6d28d9" '
        'fill-opacity="0.12" stroke="#6d28d9" stroke-width="1.5"/>'
    )
    parts.append(centred(box + 48, begin + span / 2 - 4, "all-reduce", INK))
    parts.append(centred(box + 48, begin + span / 2 + 16, "adds the terms", MUTED, 12))
    parts.append(centred(result + CELL * HIDDEN / 2, 24, "Y"))
    parts.append(centred(result + CELL * HIDDEN / 2, 44, f"{TOKENS} × {HIDDEN}", MUTED, 12))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    torch.manual_seed(0)
    x, a = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN, 4 * HIDDEN)
    b = torch.randn(4 * HIDDEN, HIDDEN)
    parts = zip(a.chunk(RANKS, dim=1), b.chunk(RANKS, dim=0), strict=True)
    terms = [gelu(x @ columns) @ rows for columns, rows in parts]
    torch.testing.assert_close(sum(terms), gelu(x @ a) @ b)
    assert not torch.allclose(terms[0], terms[1])  # neither term alone is the result

    shapes = {"X": x, "A": a, "U": x @ a, "B": b, "Y": terms[0]}
    with open("mlp_cut.svg", "w", encoding="utf-8") as file:
        file.write(draw({name: tuple(tensor.shape) for name, tensor in shapes.items()}))
    print(f"{RANKS} ranks: each multiplies {HIDDEN} x {4 * HIDDEN // RANKS} of A and", end=" ")
    print(f"{4 * HIDDEN // RANKS} x {HIDDEN} of B; one all-reduce of {TOKENS * HIDDEN} numbers")


if __name__ == "__main__":
    main()
