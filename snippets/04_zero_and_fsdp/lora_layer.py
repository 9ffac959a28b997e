"""A picture of a LoRA layer: a frozen weight, and two narrow matrices that are trained.

The widths and heights of the boxes are proportional to a layer of 128 x 128 with r = 16. The
frozen weight W needs only the bytes of its values. Each element of A and B also needs a
gradient and two moments. The output lists the bytes of both parts in mixed precision, 2 and
16 per parameter.

Draws lora_layer.svg.
"""

import re

H, R = 128, 16
UNIT, LEFT, TOP = 1.1, 150, 46  # pixels per row or column
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"


def centred(x: float, y: float, words: str, colour: str = INK, size: int = 14) -> str:
    middle = f'text-anchor="middle" font-size="{size}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {middle}>{words}</text>'


def weight_box(x: float, y: float, rows: int, columns: int, colour: str, opacity: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{UNIT * columns}" height="{UNIT * rows}" '
        f'fill="{colour}" fill-opacity="{opacity}" stroke="{colour}"/>'
    )


def thin_arrow(x: float, y: float, tip: float) -> str:
    return (
        f'<path d="M{x} {y} H{tip} M{tip - 7} {y - 4} L{tip} {y} L{tip - 7} {y + 4}" '
        f'fill="none" stroke="{INK}" stroke-width="1.4"/>'
    )


def main() -> None:
    frozen, trained = H * H, R * H + H * R
    bytes_frozen, bytes_trained = 2 * frozen, 16 * trained
    full = (2 + 2 + 12) * frozen  # W, its gradient, and the optimizer states
    assert bytes_frozen < bytes_trained < full - bytes_frozen
    print(f"W, frozen: {frozen:,} parameters x 2 bytes = {bytes_frozen:,} bytes")
    print(f"A and B, trained: {trained:,} parameters x 16 bytes = {bytes_trained:,} bytes")
    print(f"a full fine-tune of W: {full:,} bytes")

    side, thin = UNIT * H, UNIT * R
    upper, lower = TOP + side / 2, TOP + side + 80
    a, b, plus = LEFT + 20, LEFT + 250, LEFT + 400
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {lower + 92:g}" '
        'font-family="system-ui, sans-serif">',
        centred(60, (upper + lower) / 2 + 5, "x", INK, 16),
        f'<path d="M74 {(upper + lower) / 2} H100 V{upper} H{a + 50} M100 {upper} V{lower} '
        f'H{a - 4}" fill="none" stroke="{INK}" stroke-width="1.4"/>',
        weight_box(a + 50, TOP, H, H, MUTED, 0.25),
        centred(a + 50 + side / 2, upper, "W, frozen", INK, 14),
        centred(a + 50 + side / 2, upper + 22, f"{H} × {H}", MUTED, 12),
        centred(a + 50 + side / 2, upper + 39, "2 bytes each", MUTED, 12),
        weight_box(a, lower - thin / 2, R, H, ORANGE, 0.75),
        centred(a + side / 2, lower + thin / 2 + 18, "A, trained", INK, 14),
        centred(a + side / 2, lower + thin / 2 + 35, f"{R} × {H}, 16 bytes each", MUTED, 12),
        thin_arrow(a + side + 4, lower, b - 6),
        centred((a + side + b) / 2, lower - 8, f"{R} numbers", MUTED, 12),
        weight_box(b, lower - side / 2, H, R, ORANGE, 0.75),
        centred(b + thin / 2, lower + side / 2 + 18, f"B, trained: {H} × {R}", INK, 13),
        f'<path d="M{a + 50 + side} {upper} H{plus} V{(upper + lower) / 2 - 14} '
        f'M{b + thin} {lower} H{plus} V{(upper + lower) / 2 + 14}" fill="none" '
        f'stroke="{INK}" stroke-width="1.4"/>',
        f'<circle cx="{plus}" cy="{(upper + lower) / 2}" r="14" fill="none" stroke="{INK}"/>',
        centred(plus, (upper + lower) / 2 + 6, "+", INK, 18),
        centred(plus + 34, lower - 10, "× α/r", INK, 13),
        thin_arrow(plus + 14, (upper + lower) / 2, plus + 64),
        centred(plus + 100, (upper + lower) / 2 + 5, "output", INK, 14),
        "</svg>",
        "",
    ]
    svg = "\n".join(parts)
    boxes = re.findall(r'width="([\d.]+)" height="([\d.]+)"', svg)
    drawn = [(round(float(x) / UNIT), round(float(y) / UNIT)) for x, y in boxes]
    assert drawn == [(H, H), (H, R), (R, H)]  # columns and rows of W, A and B
    with open("lora_layer.svg", "w", encoding="utf-8") as file:
        file.write(svg)


if __name__ == "__main__":
    main()
