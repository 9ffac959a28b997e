"""This picture shows how two passes with different tiles give a position the same number.

Forward visits tiles of rows from top to bottom. Backward visits tiles of columns from right to
left. A function of the seed and of the position returns the same number in both passes. An
ordinary generator returns its numbers in a fixed order. The passes visit the positions in
different orders, so with such a generator a position gets a different number in each pass.
Plain Python writes dropout_positions.svg.
"""

import random

S, FORWARD, BACKWARD, DROP, SEED = 48, 16, 12, 0.25, 7
ROW, COLUMN = 20, 30
INK, MUTED = "#1f2937", "#52525b"
BLUE, ORANGE = "#0b6e99", "#c2410c"
SIDE, TOP = 192, 44


def mixed(x: int) -> int:
    """MurmurHash3's final mix: 32 bits in, 32 well-mixed bits out."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def number(row: int, column: int) -> float:
    """A number in [0, 1) that depends on the seed and on the position alone."""
    return mixed(mixed(row * S + column) ^ SEED) / 2**32


def visits() -> dict[str, list[tuple[int, int]]]:
    """All positions, in the order in which each pass visits them."""
    rows, columns = range(S), range(S)
    forward = [
        (i, j) for start in range(0, S, FORWARD) for i in rows[start : start + FORWARD]
        for j in columns
    ]  # fmt: skip
    backward = [
        (i, j) for start in reversed(range(0, S, BACKWARD)) for i in rows
        for j in columns[start : start + BACKWARD]
    ]  # fmt: skip
    return {"forward": forward, "backward": backward}


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def draw() -> str:
    scale = SIDE / S
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 290" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for x, title in ((10, "forward: tiles of rows"), (518, "backward: tiles of columns")):
        parts.append(caption(x + SIDE / 2, 28, title, INK))
        tile = FORWARD if x == 10 else BACKWARD
        for order in range(S // tile):
            start = order * tile if x == 10 else S - (order + 1) * tile
            left, top = (x, TOP + scale * start) if x == 10 else (x + scale * start, TOP)
            width, height = (SIDE, scale * tile) if x == 10 else (scale * tile, SIDE)
            parts.append(
                f'<rect x="{left}" y="{top}" width="{width}" height="{height}" fill="{BLUE}" '
                f'fill-opacity="0.08" stroke="{BLUE}" stroke-width="1.5"/>'
            )
            parts.append(caption(left + 16, top + 20, f"{order + 1}", BLUE))
        cell = x + scale * COLUMN, TOP + scale * ROW
        parts.append(
            f'<rect x="{cell[0] - 4}" y="{cell[1] - 4}" width="12" height="12" '
            f'fill="{ORANGE}"/>'
        )
        inner = cell[0] + 10 if x == 10 else cell[0] - 6
        outer = 244 if x == 10 else 476
        parts.append(
            f'<path d="M{inner} {cell[1] + 2} H{outer}" stroke="{ORANGE}" stroke-width="1.5"/>'
        )
    parts += [
        f'<rect x="244" y="82" width="232" height="82" rx="6" fill="{ORANGE}" '
        f'fill-opacity="0.1" stroke="{ORANGE}" stroke-width="1.5"/>',
        caption(360, 106, f"f(seed {SEED}, row {ROW}, column {COLUMN})", INK),
        caption(360, 128, f"= {number(ROW, COLUMN):.3f} in both passes", INK),
        caption(360, 150, "below 0.25: drop this weight", ORANGE),
        caption(106, TOP + SIDE + 24, "1, 2, 3: the order of the tiles", MUTED),
        caption(614, TOP + SIDE + 24, "1 to 4: from right to left", MUTED),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    order = visits()
    assert sorted(order["forward"]) == sorted(order["backward"])  # the same positions ...
    assert order["forward"] != order["backward"]  # ... in different orders
    places = {name: positions.index((ROW, COLUMN)) for name, positions in order.items()}
    print(f"row {ROW}, column {COLUMN} is number {places['forward']} in forward and number "
          f"{places['backward']} in backward")  # fmt: skip
    masks, stateful = {}, {}
    for name, positions in order.items():
        masks[name] = {at: number(*at) >= DROP for at in positions}
        generator = random.Random(SEED)
        stateful[name] = {at: generator.random() >= DROP for at in positions}
    assert masks["forward"] == masks["backward"]
    differ = sum(stateful["forward"][at] != stateful["backward"][at] for at in masks["forward"])
    kept = sum(masks["forward"].values())
    assert number(ROW, COLUMN) < DROP and abs(kept / S**2 - 0.75) < 0.04
    assert abs(differ / S**2 - 2 * DROP * (1 - DROP)) < 0.05  # as for two independent masks
    by_row = [sum(masks["forward"][i, j] for j in range(S)) for i in range(S)]
    by_column = [sum(masks["forward"][i, j] for i in range(S)) for j in range(S)]
    assert all(S / 2 < stay < S for stay in by_row + by_column)  # no whole row is dropped
    # a function of the place inside a tile gives a position two different numbers
    local = {
        "forward": lambda i, j: (i % FORWARD, j),
        "backward": lambda i, j: (i, j % BACKWARD),
    }
    dropped = {
        name: {at for at in positions if number(*local[name](*at)) < DROP}
        for name, positions in order.items()
    }
    assert len(dropped["forward"] ^ dropped["backward"]) > S * S / 4
    print(
        f"a function of the position: {kept} of {S * S} weights stay, in both passes the same"
    )
    print(
        f"an ordinary generator with the same seed: {differ} weights differ between the passes"
    )
    with open("dropout_positions.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
