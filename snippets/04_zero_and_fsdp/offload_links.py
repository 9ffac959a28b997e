"""A picture of how a layer comes from host memory: over one PCIe link, or over all links.

On the left, one GPU owns the layer. Its link to the host carries the whole layer, and the GPU
then broadcasts it. On the right, each of four GPUs owns a quarter. All four links work at the
same time, and an all-gather over NVLink makes the layer whole.

The program sends the layer in chunks, each over the link of its owner, and checks that the
links divide the time. Draws offload_links.svg.
"""

import math

GPUS, LAYER, PCIE, NVLINK = 4, 1.6e9, 50e9, 450e9  # GPUs; bytes; bytes/s of one GPU
CHUNKS = 1600  # of the layer, 1 MB each
INK, MUTED, BLUE, ORANGE = "#1f2937", "#52525b", "#0b6e99", "#c2410c"
WIDTH, HEIGHT, STEP = 860, 300, 98


def centred(x: float, y: float, words: str, colour: str = INK, size: int = 14) -> str:
    middle = f'text-anchor="middle" font-size="{size}"'
    return f'<text x="{x}" y="{y}" fill="{colour}" {middle}>{words}</text>'


def rounded_box(
    x: float, y: float, width: float, height: float, colour: str, full: bool
) -> str:
    opacity = 0.85 if full else 0.1
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}"/>'
    )


def link_arrow(x: float, top: float, bottom: float, wide: float) -> str:
    return (
        f'<path d="M{x} {top} V{bottom - 10}" stroke="{ORANGE}" stroke-width="{wide}"/>'
        f'<path d="M{x} {bottom} l-7 -12 h14 z" fill="{ORANGE}"/>'
    )


def links_panel(left: float, owners: int, seconds: float) -> str:
    """Host memory at the top, four GPUs below it; `owners` GPUs load a part of the layer."""
    wide = STEP * GPUS - 12
    parts = [
        centred(
            left + wide / 2,
            24,
            "one GPU owns the layer" if owners == 1 else "each GPU owns a quarter",
            INK,
            15,
        ),
        rounded_box(left, 40, wide, 44, MUTED, False),
        centred(left + wide / 2, 67, "host memory: the layer"),
    ]
    for gpu in range(GPUS):
        x = left + STEP * gpu
        if gpu < owners:
            parts.append(link_arrow(x + 43, 88, 156, 9 if owners == 1 else 3))
            parts.append(centred(x + 68, 124, f"1/{owners}" if owners > 1 else "1", MUTED, 13))
        parts.append(rounded_box(x, 160, 86, 52, BLUE, False))
        part = 70 / owners if gpu < owners else 0
        if part:
            parts.append(rounded_box(x + 8, 188, part, 14, BLUE, True))
        parts.append(centred(x + 43, 178, f"GPU {gpu}"))
    action = "broadcast" if owners == 1 else "all-gather"
    parts.append(
        f'<path d="M{left + 43} 216 v14 H{left + STEP * (GPUS - 1) + 43} v-14" fill="none" '
        f'stroke="{INK}" stroke-width="1.5"/>'
    )
    parts.append(centred(left + wide / 2, 248, f"{action} over NVLink"))
    parts.append(centred(left + wide / 2, 276, f"{seconds * 1e3:.1f} ms over PCIe", MUTED, 13))
    return "".join(parts)


def main() -> None:
    arrived = {}  # when the last chunk is on a GPU, by the number of owners
    for owners in (1, GPUS):
        clocks = [0.0] * GPUS  # each link is busy until then
        for chunk in range(CHUNKS):
            clocks[chunk * owners // CHUNKS] += LAYER / CHUNKS / PCIE
        arrived[owners] = max(clocks)  # all links work at the same time
    one, each = arrived[1], arrived[GPUS]
    assert math.isclose(one, LAYER / PCIE) and math.isclose(each, LAYER / PCIE / GPUS)
    gather = LAYER * (GPUS - 1) / GPUS / NVLINK
    assert gather < each  # NVLink is not the bottleneck
    picture = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        links_panel(20, 1, one),
        links_panel(460, GPUS, each),
        "</svg>",
        "",
    ]
    with open("offload_links.svg", "w", encoding="utf-8") as file:
        file.write("\n".join(picture))
    print(f"{LAYER / 1e9} GB over PCIe at {PCIE / 1e9:.0f} GB/s per GPU: {one * 1e3:.1f} ms")
    print(f"{GPUS} links: {each * 1e3:.1f} ms; all-gather over NVLink: {gather * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
