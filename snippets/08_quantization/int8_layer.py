"""Draws an int8 layer with its numbers: round, multiply integers, add in int32, scale.

Two tokens with four inputs are multiplied by a weight with two outputs. Each token and each
output has a scale of its own. The second token has an outlier, which makes its step large. Its
other inputs become small integers, so its outputs are less accurate. Plain Python writes the
SVG.
"""

import re

Matrix = list[list[float]]

X: Matrix = [[0.5, -1.2, 0.8, 0.3], [0.4, -0.9, 60.0, 0.2]]  # [tokens, inputs]
W: Matrix = [[0.6, -0.2], [-0.3, 0.9], [0.02, -0.01], [0.5, 0.4]]  # [inputs, outputs]
INK, MUTED, COLOUR, LOSS = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


# --8<-- [start:layer]
def columns(matrix: list) -> list:
    return [list(column) for column in zip(*matrix, strict=True)]


def to_int8(rows: Matrix) -> tuple[list[list[int]], list[float]]:
    """The integers of each row, -127 to 127, and the scale of each row."""
    scales = [max(map(abs, row)) / 127 for row in rows]
    integers = [
        [round(value / scale) for value in row] for row, scale in zip(rows, scales, strict=True)
    ]
    return integers, scales


def int8_layer(x: Matrix, w: Matrix) -> tuple[list[list[int]], Matrix]:
    """The sums in integers and the outputs, with a scale per token and per output."""
    q, token_scales = to_int8(x)
    r, output_scales = to_int8(columns(w))  # a row of r contains the weights of one output
    sums = [[sum(a * b for a, b in zip(row, out, strict=True)) for out in r] for row in q]
    y = [
        [total * token * output for total, output in zip(row, output_scales, strict=True)]
        for row, token in zip(sums, token_scales, strict=True)
    ]
    return sums, y


# --8<-- [end:layer]


def product(x: Matrix, w: Matrix) -> Matrix:
    return [[sum(a * b for a, b in zip(row, c, strict=True)) for c in columns(w)] for row in x]


def errors(y: Matrix, exact: Matrix) -> list[float]:
    """The relative error of each token."""

    def norm(row: list[float]) -> float:
        return sum(value**2 for value in row) ** 0.5

    return [
        norm([a - b for a, b in zip(ours, row, strict=True)]) / norm(row)
        for ours, row in zip(y, exact, strict=True)
    ]


def put_words(x: float, y: float, words: str, colour: str, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def grid(x: float, y: float, cells: list, width: int, colour: str, places: str) -> list[str]:
    """A matrix as boxes with a number in each."""
    parts = []
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            parts.append(
                f'<rect x="{x + j * width:g}" y="{y + i * 28:g}" width="{width}" height="28" '
                f'fill="{colour}" fill-opacity="0.1" stroke="{colour}" stroke-opacity="0.6"/>'
            )
            parts.append(
                f'<text x="{x + (j + 1) * width - 6:g}" y="{y + i * 28 + 19:g}" '
                f'text-anchor="end" fill="{INK}" font-size="14">{value:{places}}</text>'
            )
    return parts


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    corners = ((-9, -5), (-9, 5)) if y1 == y2 else ((-5, -9), (5, -9))
    head = " ".join(f"{x2 + a},{y2 + b}" for a, b in corners)
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{MUTED}" stroke-width="2"/>'
        f'<polygon points="{x2},{y2} {head}" fill="{MUTED}"/>'
    )


def draw() -> str:
    q, token_scales = to_int8(X)
    r, output_scales = to_int8(columns(W))
    sums, y = int8_layer(X, W)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 296" '
        'font-family="system-ui, sans-serif">'
    ]
    parts.append(put_words(8, 20, "inputs, fp32", INK))
    parts += grid(8, 30, X, 46, LOSS, "g")
    parts.append(put_words(262, 20, "int8", INK))
    parts += grid(262, 30, q, 44, COLOUR, "d")
    parts.append(put_words(8, 104, "one row for each token", MUTED, 13))
    for i, scale in enumerate(token_scales):
        parts.append(put_words(444, 49 + 28 * i, f"× {scale:.4f}", MUTED, 13))
    parts.append(put_words(262, 104, "a scale for each token", MUTED, 13))

    parts.append(put_words(8, 148, "weights, fp32", INK))
    parts += grid(8, 158, W, 54, LOSS, "g")
    parts.append(put_words(262, 148, "int8", INK))
    parts += grid(262, 158, columns(r), 54, COLOUR, "d")
    parts.append(put_words(8, 288, "one column for each output", MUTED, 13))
    words = " and ".join(f"× {scale:.4f}" for scale in output_scales)
    parts.append(put_words(262, 288, f"a scale for each output: {words}", MUTED, 13))

    for x1, at in ((200, 58), (124, 214)):
        parts += [arrow(x1, at, 254, at), put_words(202, at - 8, "round", MUTED, 13)]
    parts.append(arrow(510, 58, 556, 58))
    parts.append(
        f'<path d="M378 190 L520 190 L520 58" stroke="{MUTED}" stroke-width="2" fill="none"/>'
    )
    parts.append(put_words(562, 20, "sums, int32", INK))
    parts += grid(562, 30, sums, 76, COLOUR, "d")
    parts += [arrow(684, 90, 684, 154), put_words(562, 118, "× scales", MUTED, 13)]
    parts.append(put_words(562, 148, "outputs, fp32", INK))
    parts += grid(562, 158, y, 76, LOSS, ".3f")
    parts.append(put_words(562, 234, "without rounding", MUTED, 13))
    for i, row in enumerate(product(X, W)):
        words = "   ".join(f"{value:.3f}" for value in row)
        parts.append(put_words(562, 252 + 18 * i, words, MUTED, 13))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("int8_layer.svg", "w", encoding="utf-8") as file:
        file.write(drawing := draw())
    sums, y = int8_layer(X, W)
    exact, found = product(X, W), errors(y, product(X, W))
    for name, row, ours, true, error in zip(
        ("token 1", "token 2"), sums, y, exact, found, strict=True
    ):
        print(f"{name}: sums {row[0]:5} and {row[1]:6}, outputs {ours[0]:.3f} and "
              f"{ours[1]:.3f}, exact {true[0]:.3f} and {true[1]:.3f}, "
              f"error {error:.1%}")  # fmt: skip
    assert all(abs(total) > 127 for row in sums for total in row)  # int8 cannot contain them
    assert int8_layer([[1.0] * 4], [[1.0]] * 4)[0] == [[4 * 127**2]]  # too large for 16 bits
    # the same product from rounded floats, element by element
    q, token_scales = to_int8(X)
    r, output_scales = to_int8(columns(W))
    for i, j in ((i, j) for i in range(2) for j in range(2)):
        terms = [q[i][k] * token_scales[i] * (r[j][k] * output_scales[j]) for k in range(4)]
        assert abs(sum(terms) - y[i][j]) < 1e-12
    assert q == [
        [53, -127, 85, 32],
        [1, -2, 127, 0],
    ]  # by hand, for example 0.5/1.2 · 127 = 52.9
    assert max(abs(value) for row in q + r for value in row) == 127
    # all numbers of the drawing
    texts = " ".join(re.findall(r">([-× .\d]+)</text>", drawing)).replace("×", "")
    matrices = (X, q, [token_scales], W, columns(r), sums, y, exact)
    values = [value for matrix in matrices for row in matrix for value in row]
    for text, value in zip(texts.split(), values, strict=True):
        assert abs(float(text) - value) < 6e-4, (text, value)

    tame = [X[0], [0.8 if value == 60 else value for value in X[1]]]
    without = errors(int8_layer(tame, W)[1], product(tame, W))[1]
    print(f"token 2 with 0.8 in place of its outlier: error {without:.1%}")
    assert without < 0.01 and found[0] < 0.01 and found[1] > 5 * without
    shared = [[value for row in X for value in row]]  # one scale for both tokens
    step = to_int8(shared)[1][0]
    rounded = [[round(value / step) * step for value in row] for row in X]
    weights = [[r[j][k] * output_scales[j] for j in range(2)] for k in range(4)]
    both = errors(product(rounded, weights), exact)
    print(f"one scale for both tokens: errors of {both[0]:.1%} and {both[1]:.1%}")
    assert both[0] > 10 * found[0] and abs(both[1] - found[1]) < 1e-9


if __name__ == "__main__":
    main()
