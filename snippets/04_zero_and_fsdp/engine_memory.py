"""A picture of the memory that DeepSpeed uses in each stage, with and without offload.

Each row of the picture is a configuration, and it shows one of four ranks. The coloured
blocks are the parts of the model states that this rank keeps, in mixed precision with Adam: 2
bytes per parameter for parameters, 2 for gradients and 12 for the optimizer. A dashed outline
shows the whole part. The blocks are in GPU memory, in host memory or on NVMe, and arrows show
what crosses the bus in one step. The output lists the bytes per parameter in each memory.

The program compares its numbers with the formulas of the ZeRO paper. Draws engine_memory.svg.
"""

N = 4  # ranks
BYTES = {"P": 2, "G": 2, "O": 12}  # per parameter: parameters, gradients, optimizer
FIRST_STAGE = {"P": 3, "G": 2, "O": 1}  # from this stage on, a rank keeps only 1/N
PLACES = "GPU memory", "host memory", "NVMe"
# --8<-- [start:layouts]
LAYOUTS = (  # name, stage, offloaded parts, place of the offloaded parts
    ("stage 1", 1, "", 0),
    ("stage 2", 2, "", 0),
    ("stage 3", 3, "", 0),
    ("stage 3, optimizer on the CPU", 3, "GO", 1),
    ("stage 3, all on the CPU", 3, "PGO", 1),
    ("stage 3, all on NVMe", 3, "PGO", 2),
)


def bytes_kept(stage: int, offloaded: str, place: int) -> list[dict[str, float]]:
    """Return for each memory the bytes per parameter of each part that one rank keeps there."""
    memories: list[dict[str, float]] = [{}, {}, {}]
    for part, size in BYTES.items():
        kept = size / N if stage >= FIRST_STAGE[part] else size
        memories[place if part in offloaded else 0][part] = kept
    return memories


# --8<-- [end:layouts]
UNIT, HIGH = 16, 26  # pixels per byte, height of a block
FRAMES = (196, 604, 796)  # left ends of the three memories
WIDTHS = (318, 100, 100)
TOP, ROW = 66, 92
INK, MUTED = "#1f2937", "#52525b"
COLOURS = {"P": "#0b6e99", "G": "#c2410c", "O": "#15803d"}
NETWORK = {
    1: ("reduces gradients,", "gathers parameters"),
    2: ("reduces gradients,", "gathers parameters"),
    3: ("gathers parameters twice,", "reduces gradients"),
}
BUS = {  # what moves between two neighbouring memories: to the right, to the left
    "stage 3, optimizer on the CPU": (("gradients", "parameters"),),
    "stage 3, all on the CPU": (("gradients", "parameters"),),
    "stage 3, all on NVMe": (("gradients", "parameters"), ("all parts", "all parts")),
}


def label(x: float, y: float, words: str, size: int = 13, anchor: str = "start", **more) -> str:
    colour = more.get("colour", INK)
    return (
        f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}" '
        f'text-anchor="{anchor}">{words}</text>'
    )


def part_block(x: float, y: float, width: float, part: str) -> str:
    """A coloured block with its letter inside, or above it if the block is narrow."""
    middle = x + width / 2
    if width >= 12:
        letter = label(middle, y + 18, part, 13, "middle", colour="#ffffff")
    else:
        letter = label(middle, y - 4, part, 12, "middle")
    place = f'x="{x}" y="{y}" width="{width}" height="{HIGH}"'
    return f'<rect {place} fill="{COLOURS[part]}"/>{letter}'


def bus_arrow(x: float, y: float, length: float, words: str) -> str:
    """An arrow with a label above it; a negative length points to the left."""
    tip = x + length
    back = tip - 7 if length > 0 else tip + 7
    return (
        f'<path d="M{x} {y} H{tip} M{back} {y - 4} L{tip} {y} L{back} {y + 4}" fill="none" '
        f'stroke="{INK}" stroke-width="1.4"/>'
        + label(x + length / 2, y - 5, words, 12, "middle", colour=MUTED)
    )


def memory_frame(frame: int, y: float, parts: dict[str, float], stage: int) -> str:
    """A frame for one memory, with the whole parts dashed and the kept parts coloured."""
    left, width = FRAMES[frame], WIDTHS[frame]
    drawn = [
        f'<rect x="{left}" y="{y}" width="{width}" height="62" rx="5" fill="none" '
        f'stroke="{MUTED}" stroke-opacity="0.7"/>'
    ]
    x = left + 8
    for part in "PGO":
        if part in parts:
            if frame == 0 and parts[part] < BYTES[part]:  # show the whole part on the GPU
                whole = UNIT * BYTES[part]
                drawn.append(
                    f'<rect x="{x}" y="{y + 18}" width="{whole}" height="{HIGH}" fill="none" '
                    f'stroke="{MUTED}" stroke-dasharray="3 3"/>'
                )
            else:
                whole = UNIT * parts[part]
            drawn.append(part_block(x, y + 18, UNIT * parts[part], part))
            x += whole + 5
    if frame == 0 and stage == 3:
        place = f'x="{left + width - 28}" y="{y + 18}" width="20" height="{HIGH}"'
        line = f'stroke="{COLOURS["P"]}" stroke-width="1.6" stroke-dasharray="4 2"'
        drawn.append(f'<rect {place} fill="none" {line}/>')
        drawn.append(label(left + width - 8, y + 14, "1 layer", 12, "end", colour=MUTED))
    total = sum(parts.values())
    words = f"{total:g}Ψ bytes" if total else ("buffers" if frame else "")
    drawn.append(label(left + 8, y + 57, words, 12, colour=MUTED))
    return "".join(drawn)


def draw() -> str:
    width, height = FRAMES[2] + WIDTHS[2] + 10, TOP + ROW * len(LAYOUTS) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif">'
    ]
    for frame, name in enumerate(PLACES):
        parts.append(label(FRAMES[frame] + WIDTHS[frame] / 2, 24, name, 15, "middle"))
    parts.append(label(8, 24, f"one of {N} ranks", 15))
    parts.append(label(8, 46, "and its network", 12, colour=MUTED))
    for number, (name, stage, offloaded, place) in enumerate(LAYOUTS):
        y = TOP + ROW * number
        title, _, second = name.partition(", ")
        parts.append(label(8, y + 16, title + ("," if second else ""), 14))
        if second:
            parts.append(label(8, y + 33, second, 14))
        for line, words in enumerate(NETWORK[stage]):
            offset = 50 if second else 34
            parts.append(label(8, y + offset + 15 * line, words, 12, colour=MUTED))
        for frame, kept in enumerate(bytes_kept(stage, offloaded, place)):
            if kept or frame == 0 or frame < place:
                parts.append(memory_frame(frame, y, kept, stage))
        for gap, (right, left) in enumerate(BUS.get(name, ())):
            begin, end = FRAMES[gap] + WIDTHS[gap] + 5, FRAMES[gap + 1] - 5
            parts.append(bus_arrow(begin, y + 24, end - begin, right))
            parts.append(bus_arrow(end, y + 52, begin - end, left))
    y = height - 14
    for x, (part, name) in zip(
        (196, 336, 466),
        (("P", "parameters"), ("G", "gradients"), ("O", "optimizer states")),
        strict=True,
    ):
        parts.append(
            f'<rect x="{x}" y="{y - 14}" width="18" height="18" fill="{COLOURS[part]}"/>'
            + label(x + 9, y, part, 13, "middle", colour="#ffffff")
            + label(x + 26, y, name)
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    formulas = (4 + 12 / N, 2 + 14 / N, 16 / N)  # ZeRO, section 5: per rank and parameter
    print(f"{N} ranks, bytes per parameter of one rank  {'  '.join(PLACES)}")
    for name, stage, offloaded, place in LAYOUTS:
        memories = bytes_kept(stage, offloaded, place)
        totals = [sum(kept.values()) for kept in memories]
        assert sum(totals) == formulas[stage - 1]  # offload moves bytes, it removes none
        assert set().union(*memories) == set(BYTES) and sum(map(len, memories)) == len(BYTES)
        print(f"{name:39}" + "".join(f"{total:12.1f}" for total in totals).rstrip())
    optimizer_only = bytes_kept(3, "GO", 1)
    assert 16 / N - sum(optimizer_only[0].values()) == 14 / N  # GPU memory that becomes free
    with open("engine_memory.svg", "w", encoding="utf-8") as file:
        file.write(draw())


if __name__ == "__main__":
    main()
