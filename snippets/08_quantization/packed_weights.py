"""Draws how eight weights become four bytes and a scale, and what a kernel makes of them.

Each weight is divided by the scale of its group and rounded to an integer of 4 bits. Two
integers share a byte. Memory contains only these bytes and the scale. The kernel rebuilds the
weights in registers and multiplies floats. Plain Python writes the SVG.
"""

WEIGHTS = [0.31, -0.12, 0.875, -0.55, 0.05, -0.7, 0.27, -0.36]  # a group of one output
INPUTS = [1.0, 2.0, -1.0, 0.5, 3.0, 1.0, -2.0, 1.0]
INK, MUTED, COLOUR, LOSS = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
LEFT, CELL, HEIGHT = 8, 60, 28  # pixels


# --8<-- [start:pack]
def quantize(weights: list[float]) -> tuple[list[int], float]:
    """Codes from 1 to 15, where 8 means zero, and the scale of the group."""
    scale = max(map(abs, weights)) / 7
    return [round(weight / scale) + 8 for weight in weights], scale


def pack_codes(codes: list[int]) -> bytes:
    """Two codes in a byte: the even one in the low 4 bits, the odd one in the high 4 bits."""
    pairs = zip(codes[0::2], codes[1::2], strict=True)
    return bytes(even | odd << 4 for even, odd in pairs)


def rebuild(packed: bytes, scale: float) -> list[float]:
    """As in registers: separate the codes, subtract 8, and multiply by the scale."""
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [(code - 8) * scale for code in codes]


# --8<-- [end:pack]


def put_words(x: float, y: float, words: str, colour: str, size: int = 14) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}">{words}</text>'


def row(y: float, cells: list[str], width: int, colour: str) -> list[str]:
    """Boxes with centred words."""
    parts = []
    for i, words in enumerate(cells):
        x = LEFT + i * width
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" fill="{colour}" '
            f'fill-opacity="0.1" stroke="{colour}" stroke-opacity="0.7"/>'
        )
        parts.append(
            f'<text x="{x + width / 2:g}" y="{y + 19}" text-anchor="middle" fill="{INK}" '
            f'font-size="14">{words}</text>'
        )
    return parts


def arrow(y: float, words: str) -> list[str]:
    x = LEFT + 4 * CELL
    return [
        f'<line x1="{x}" y1="{y}" x2="{x}" y2="{y + 26}" stroke="{MUTED}" stroke-width="2"/>',
        f'<polygon points="{x},{y + 30} {x - 5},{y + 20} {x + 5},{y + 20}" fill="{MUTED}"/>',
        put_words(x + 14, y + 20, words, MUTED, 13),
    ]


def draw() -> str:
    codes, scale = quantize(WEIGHTS)
    packed = pack_codes(codes)
    side = LEFT + 8 * CELL + 14
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 352" '
        'font-family="system-ui, sans-serif">'
    ]
    parts += row(12, [f"{weight:g}" for weight in WEIGHTS], CELL, LOSS)
    parts += [put_words(side, 24, "eight weights in bf16", INK)]
    parts += [put_words(side, 42, f"{2 * len(WEIGHTS)} bytes", MUTED, 13)]
    parts += arrow(44, f"divide by the scale {scale:g}, round, add 8")
    parts += row(80, [str(code) for code in codes], CELL, COLOUR)
    parts += [put_words(side, 99, "eight codes of 4 bits", INK)]
    parts += arrow(112, "put two codes into a byte")
    binary = [f"{byte >> 4:04b} {byte & 15:04b}" for byte in packed]
    parts += row(148, binary, 2 * CELL, COLOUR)
    parts += [put_words(side, 160, "memory: four bytes", INK)]
    parts += [put_words(side, 178, "and 2 bytes for the scale", MUTED, 13)]
    parts += arrow(180, "read 6 bytes, rebuild the weights in registers")
    back = rebuild(packed, scale)
    parts += row(216, [f"{weight:g}" for weight in back], CELL, LOSS)
    parts += [put_words(side, 235, "eight weights, rounded", INK)]
    parts += arrow(248, f"multiply by the inputs {', '.join(f'{x:g}' for x in INPUTS)}")
    ours, exact = (
        sum(w * x for w, x in zip(ws, INPUTS, strict=True)) for ws in (back, WEIGHTS)
    )
    parts += row(284, [f"output {ours:.3f}"], 8 * CELL, LOSS)
    parts += [put_words(side, 303, f"without rounding {exact:.3f}", MUTED, 13)]
    words = "in each byte, the code on the right belongs to the weight on the left"
    parts += [put_words(LEFT, 340, words, MUTED, 13)]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("packed_weights.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    codes, scale = quantize(WEIGHTS)
    packed = pack_codes(codes)
    back = rebuild(packed, scale)
    print(f"scale {scale:g}, codes {codes}, bytes {packed.hex(' ')}")
    # a byte in hexadecimal: its second digit is the even code, its first digit the odd code
    assert packed.hex() == "".join(
        f"{odd:x}{even:x}" for even, odd in zip(codes[0::2], codes[1::2], strict=True)
    )
    assert len(packed) * 2 == len(WEIGHTS) and min(codes) >= 1 and max(codes) == 15
    errors = [abs(a - b) for a, b in zip(back, WEIGHTS, strict=True)]
    print(f"largest error {max(errors):.3f}, half a step is {scale / 2:.4f}")
    assert 0 < max(errors) <= scale / 2 and errors[2] == 0  # the largest weight is exact
    print("weights per scale   bits per weight   70.6 billion parameters")
    for group in (8, 32, 128):
        bits = 4 + 16 / group
        print(f"{group:17} {bits:17.3f} {70.6 * bits / 8:20.1f} GB")
    assert (len(packed) + 2) * 8 / len(WEIGHTS) == 4 + 16 / 8  # as the bytes of the picture


if __name__ == "__main__":
    main()
