"""A picture of attention in time: which scores exist, and what crosses between memory and chip.

Plain attention runs three kernels. Each of them reads its inputs from memory and writes its
result back, so the whole matrix of scores and the whole matrix of weights are in memory. Flash
attention is one kernel. It computes one tile of scores at a time, and no score leaves the chip.

Both methods run here on a simulated chip, which counts loads and stores. Their outputs are
compared with a direct sum over all keys, and their counts with two formulas. Plain Python
writes the SVG, so the program runs without any package.
"""

import math
import random

S, D, TILE = 6, 2, 2  # tokens, width of the head, queries and keys of a tile
Matrix = list[list[float]]


class Chip:
    """Counts the elements that move between memory and chip, and the most scores in each."""

    def __init__(self) -> None:
        self.moved = 0
        self.in_memory = self.on_chip = 0  # elements of the largest matrix Z or P, or tile
        self.events: list[tuple[str, str]] = []  # ("load", "K2"), ("tile", "1 2"), ...

    def load(self, name: str, matrix: Matrix) -> Matrix:
        self.moved += sum(map(len, matrix))
        self.events.append(("load", name))
        return [row[:] for row in matrix]

    def store(self, name: str, matrix: Matrix) -> Matrix:
        self.moved += sum(map(len, matrix))
        self.events.append(("store", name))
        if name in "ZP":
            self.in_memory = max(self.in_memory, sum(map(len, matrix)))
        return [row[:] for row in matrix]


def times_transposed(a: Matrix, b: Matrix) -> Matrix:
    """Return a bᵀ for a [m, k] and b [n, k]."""
    return [[sum(x * y for x, y in zip(r, c, strict=True)) for c in b] for r in a]


def transposed(a: Matrix) -> Matrix:
    return [list(column) for column in zip(*a, strict=True)]


def plain(chip: Chip, q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    scores = chip.store("Z", times_transposed(chip.load("Q", q), chip.load("K", k)))
    rows = [[math.exp(z - max(row)) for z in row] for row in chip.load("Z", scores)]
    weights = chip.store("P", [[p / sum(row) for p in row] for row in rows])
    out = times_transposed(chip.load("P", weights), transposed(chip.load("V", v)))
    return chip.store("O", out)


# --8<-- [start:flash]
def flash(chip: Chip, q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    result: Matrix = []
    for i in range(0, S, TILE):
        queries = chip.load(f"Q{i // TILE + 1}", q[i : i + TILE])
        largest, total = [-math.inf] * TILE, [0.0] * TILE
        out = [[0.0] * D for _ in queries]
        for j in range(0, S, TILE):
            keys = chip.load(f"K{j // TILE + 1}", k[j : j + TILE])
            values = chip.load(f"V{j // TILE + 1}", v[j : j + TILE])
            tile = times_transposed(queries, keys)  # the only scores that exist now
            chip.on_chip = max(chip.on_chip, sum(map(len, tile)))
            chip.events.append(("tile", f"{i // TILE} {j // TILE}"))
            for r, row in enumerate(tile):
                new = max(largest[r], *row)
                shrink = math.exp(largest[r] - new)
                p = [math.exp(z - new) for z in row]
                total[r] = total[r] * shrink + sum(p)
                added = times_transposed([p], transposed(values))[0]
                out[r] = [o * shrink + a for o, a in zip(out[r], added, strict=True)]
                largest[r] = new
        out = [[o / total[r] for o in row] for r, row in enumerate(out)]
        result += chip.store(f"O{i // TILE + 1}", out)
    return result


# --8<-- [end:flash]


def direct(q: Matrix, k: Matrix, v: Matrix, i: int, c: int) -> float:
    """Return one element of the output as a quotient of two sums, without a maximum."""
    e = [math.exp(sum(q[i][x] * k[j][x] for x in range(D))) for j in range(S)]
    return sum(e[j] * v[j][c] for j in range(S)) / sum(e)


INK, MUTED = "#1f2937", "#52525b"
READ, WRITE, SCORES = "#0b6e99", "#15803d", "#c2410c"
LEFT, RIGHT = 76, 712


def words(x: float, y: float, text: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def outlined(x: float, y: float, width: float, height: float, colour: str, fill: float) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" '
        f'fill-opacity="{fill}" stroke="{colour}"/>'
    )


def arrow(x: float, start: float, end: float, colour: str) -> str:
    back = -7 if end > start else 7
    return (
        f'<path d="M{x:g} {start:g} V{end:g} m-4 {back} l4 {-back} l4 {back}" '
        f'fill="none" stroke="{colour}" stroke-width="1.8"/>'
    )


def lanes(y: float, gap: float) -> list[str]:
    parts = []
    for top, height, name in ((y, 56, "memory"), (y + 56 + gap, 58, "chip")):
        parts.append(outlined(LEFT, top, RIGHT - LEFT, height, MUTED, 0.08))
        parts.append(words(2, top + 33, name, INK, "start"))
    return parts


def draw_plain(y: float) -> list[str]:
    low, high = y + 56, y + 104  # the lower edge of memory, the upper edge of the chip
    parts = [words(LEFT, y - 10, "Plain attention: three kernels", INK, "start")]
    parts += lanes(y, 48)
    for x, width, name in ((100, 205, "Q Kᵀ"), (315, 160, "softmax"), (485, 205, "P V")):
        parts += [outlined(x, high + 12, width, 34, MUTED, 0.18)]
        parts += [words(x + width / 2, high + 34, name)]
    for x, name in ((130, "Q"), (165, "K"), (590, "V"), (650, "O")):
        parts += [outlined(x - 8, y + 7, 16, 42, READ, 0.16), words(x, y + 33, name)]
    for x, name in ((310, "Z"), (480, "P")):
        parts += [outlined(x - 21, y + 7, 42, 42, SCORES, 0.3), words(x, y + 33, name)]
    for x in (130, 165, 323, 493, 590):
        parts.append(arrow(x, low - 5, high + 11, READ))
    for x in (297, 467, 650):
        parts.append(arrow(x, high + 11, low - 5, WRITE))
    for x, text, anchor in (
        (174, "2sd", "start"), (289, "s²", "end"), (331, "s²", "start"), (459, "s²", "end"),
        (501, "s²", "start"), (598, "sd", "start"), (658, "sd", "start"),
    ):  # fmt: skip
        parts.append(words(x, low + 30, text, INK, anchor))
    return parts


def draw_flash(y: float, events: list[tuple[str, str]]) -> list[str]:
    low, high, side = y + 56, y + 92, S // TILE
    parts = [words(LEFT, y - 10, "Flash attention: one kernel, one tile of scores at a time",
                   INK, "start")]  # fmt: skip
    parts += lanes(y, 36)
    step = (RIGHT - LEFT) / side**2
    small = str.maketrans("123456789", "₁₂₃₄₅₆₇₈₉")
    loads: list[str] = []
    number = 0
    for kind, name in events:
        middle = LEFT + step * (number + 0.5)
        if kind == "load":
            loads.append(name.translate(small))
        elif kind == "tile":
            parts.append(words(middle, y + 20, " ".join(loads), READ))
            parts.append(arrow(middle - 12, low - 28, high, READ))
            i, j = map(int, name.split())
            for row in range(side):
                for column in range(side):
                    left, top = middle - 21 + 14 * column, high + 8 + 14 * row
                    full = (row, column) == (i, j)
                    parts.append(outlined(left, top, 14, 14, SCORES if full else MUTED,
                                     0.75 if full else 0))  # fmt: skip
            loads, number = [], number + 1
        else:
            before = LEFT + step * (number - 0.5)
            parts.append(arrow(before + 16, high, low - 12, WRITE))
            parts.append(words(before + 16, low - 16, name.translate(small), WRITE))
    return parts


def draw(events: list[tuple[str, str]]) -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 404" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    parts += draw_plain(30)
    parts += draw_flash(232, events)
    parts.append(f'<path d="M{LEFT} 394 H{RIGHT} m-7 -4 l7 4 l-7 4" fill="none" '
                 f'stroke="{MUTED}"/>')  # fmt: skip
    parts.append(words(2, 398, "time", MUTED, "start"))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    generator = random.Random(0)
    q, k, v = ([[generator.gauss(0, 2) for _ in range(D)] for _ in range(S)] for _ in range(3))
    chips = {"plain": Chip(), "flash": Chip()}
    formulas = {"plain": 4 * S * S + 4 * S * D, "flash": 2 * S * D * (1 + S // TILE)}
    print(f"{S} tokens, a head of width {D}, tiles of {TILE} x {TILE}")
    for attention in (plain, flash):
        chip = chips[attention.__name__]
        out = attention(chip, q, k, v)
        for i in range(S):
            for c in range(D):
                assert math.isclose(out[i][c], direct(q, k, v, i, c), rel_tol=1e-9)
        assert chip.moved == formulas[attention.__name__]
        print(
            f"{attention.__name__}: {chip.moved} elements cross between memory and chip, "
            f"and memory stores {chip.in_memory} scores at a time"
        )
    large = [[100 * x for x in row] for row in q]  # exp overflows without the maximum
    outs = [attention(Chip(), large, k, v) for attention in (plain, flash)]
    for row, other in zip(*outs, strict=True):
        assert all(math.isclose(x, y, rel_tol=1e-9) for x, y in zip(row, other, strict=True))
    print(f"flash: the chip computes {chips['flash'].on_chip} scores at a time")
    assert chips["plain"].in_memory == S * S
    assert (chips["flash"].in_memory, chips["flash"].on_chip) == (0, TILE * TILE)
    tiles = [name for kind, name in chips["flash"].events if kind == "tile"]
    side = S // TILE
    assert tiles == [f"{i} {j}" for i in range(side) for j in range(side)]  # each tile once
    with open("scores_at_a_time.svg", "w", encoding="utf-8") as file:
        file.write(draw(chips["flash"].events))


if __name__ == "__main__":
    main()
