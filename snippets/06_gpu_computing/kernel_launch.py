"""A picture of a launch: the host goes on while the GPU runs, and threads share the elements.

The upper part shows time from left to right. The launch returns before the kernel ends, and the
copy of the result waits for the kernel. The lower part divides the grid into blocks, a block
into warps and a warp into lanes. Thread `threadIdx.x` of block `blockIdx.x` gets the element
i = blockIdx.x * blockDim.x + threadIdx.x. The last block has threads without an element.

Plain Python writes the SVG, so the program runs without any package.
"""

N, BLOCK, WARP = 1000, 256, 32
WIDTH = 720
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def element(block: int, thread: int) -> int | None:
    """Return the index of the element of a thread, or None if no element is left for it."""
    i = block * BLOCK + thread
    return i if i < N else None


def zoom(x: float, width: float, y: float, left: float, right: float, below: float) -> str:
    """Two lines from a box to the wider row that shows its content."""
    path = f"M{x} {y} L{left} {below} M{x + width} {y} L{right} {below}"
    return f'<path d="{path}" stroke="{MUTED}" stroke-dasharray="3 3" fill="none"/>'


# --8<-- [start:draw]
def draw(blocks: int) -> str:
    left, width = 76, WIDTH - 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 396" '
        'font-family="system-ui, sans-serif" font-size="14">',
        caption(2, 33, "host", INK, "start"),
        box(left, 8, 168, 40, f"add&lt;&lt;&lt;{blocks}, {BLOCK}&gt;&gt;&gt;", BLUE),
        box(left + 176, 8, 118, 40, "goes on", BLUE),
        box(left + 302, 8, 240, 40, "cudaMemcpy waits", ORANGE),
        box(left + 550, 8, 90, 40, "copies z", BLUE),
        caption(2, 85, "GPU", INK, "start"),
        box(left + 172, 60, 370, 40, "the kernel runs", GREEN),
        caption(2, 155, "grid", INK, "start"),
    ]
    each = width / blocks
    for block in range(blocks):  # row 1: the grid
        x = left + block * each
        parts.append(box(x, 130, each - 6, 40, f"block {block}", GREEN))
    idle = sum(element(blocks - 1, thread) is None for thread in range(BLOCK))
    thin = (each - 6) * idle / BLOCK  # the threads without an element
    parts.append(
        f'<rect x="{left + width - 6 - thin}" y="130" width="{thin}" height="40" '
        f'fill="{ORANGE}" fill-opacity="0.6"/>'
    )
    parts.append(caption(left + width - 6, 188, f"{idle} idle threads", ORANGE, "end"))
    parts.append(zoom(left + each, each - 6, 170, left, left + width - 6, 204))
    parts.append(caption(2, 229, "block 1", INK, "start"))
    for warp in range(BLOCK // WARP):  # row 2: the warps of block 1
        x = left + warp * width / 8
        parts.append(box(x, 204, width / 8 - 6, 40, f"warp {warp}", VIOLET))
    parts.append(zoom(left + width / 4, width / 8 - 6, 244, left, left + width - 6, 278))
    parts.append(caption(2, 303, "warp 2", INK, "start"))
    step = width / WARP
    for lane in range(WARP):  # row 3: the lanes of warp 2, and their elements
        x = left + lane * step
        parts.append(box(x, 278, step - 3, 40, "", BLUE))
        parts.append(
            f'<path d="M{x + step / 2 - 1.5} 320 V340" stroke="{MUTED}" stroke-width="1.2"/>'
        )
        parts.append(box(x, 342, step - 3, 20, "", MUTED))
    first, last = element(1, 2 * WARP), element(1, 3 * WARP - 1)
    for lane, anchor in ((0, "start"), (WARP - 1, "end")):
        x = left + lane * step + (step - 3 if anchor == "end" else 0)
        i = element(1, 2 * WARP + lane)
        parts.append(caption(x, 380, f"z[{i}]", INK, anchor))
    parts.append(caption(2, 357, "memory", INK, "start"))
    parts.append(
        caption(left + width / 2, 380, f"{last - first + 1} neighbouring floats", MUTED)
    )
    return "\n".join([*parts, "</svg>", ""])


# --8<-- [end:draw]


def main() -> None:
    blocks = -(-N // BLOCK)
    owners = [element(block, thread) for block in range(blocks) for thread in range(BLOCK)]
    elements = [i for i in owners if i is not None]
    assert sorted(elements) == list(range(N))  # every element has exactly one thread
    assert all(i is None for i in owners[N:])  # only threads at the end have none
    with open("kernel_launch.svg", "w", encoding="utf-8") as file:
        file.write(draw(blocks))
    print(
        f"{N} elements, {blocks} blocks of {BLOCK} threads: {owners.count(None)} threads idle"
    )
    i = element(1, 2 * WARP)
    print(f"block 1, warp 2: elements {i} to {i + WARP - 1}")


if __name__ == "__main__":
    main()
