"""A picture of the sectors that one load of a warp touches, in a coalesced and a naive kernel.

Memory is read in sectors of 32 bytes, which hold eight floats. In the coalesced kernel, lane i
reads the float i, so the lanes use every byte of four sectors. In the naive kernel, each thread
works on a row of its own. Neighbouring lanes then read addresses that are one row apart, and
every lane touches a different sector. The table also counts both loads of the kernels `naive`
and `coalesced` in sgemm.cu, which multiply matrices.

Plain Python writes the SVG, so the program runs without any package.
"""

LANES, SECTOR, FLOAT = 32, 32, 4
ROW = 1024  # floats in a row of the matrix
WIDTH = 720
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


# --8<-- [start:touched]
LOADS = {  # the first float that lane i of a warp reads, and the number of floats it reads
    "coalesced: x[i]": (lambda i: i, 1),
    "naive: x[1024 * i]": (lambda i: ROW * i, 1),
    "float4: x[4 * i]": (lambda i: 4 * i, 4),
    "sgemm naive, A[row = i, k]": (lambda i: ROW * i, 1),
    "sgemm naive, B[k, col]": (lambda i: 0, 1),
    "sgemm coalesced, A[row, k]": (lambda i: 0, 1),
    "sgemm coalesced, B[k, col = i]": (lambda i: i, 1),
}


def touched(first, floats: int) -> tuple[set[int], int]:
    """The sectors that one load of a warp touches, and the bytes in them that it uses."""
    used = {
        FLOAT * first(lane) + byte for lane in range(LANES) for byte in range(FLOAT * floats)
    }
    return {byte // SECTOR for byte in used}, len(used)


# --8<-- [end:touched]


def panel(y: float, title: str, first, colour: str) -> list[str]:
    """Lanes above, sectors below, and a line from each lane to the float that it reads."""
    sectors, used = touched(first, 1)
    order = sorted(sectors)
    left, lane_width = 4, (WIDTH - 8) / LANES
    gap = 5
    sector_width = min((WIDTH - 8) / len(order), 8 * lane_width / 2) - gap
    start = left + ((WIDTH - 8) - len(order) * (sector_width + gap)) / 2
    parts = [
        caption(left, y, title, colour, "start"),
        caption(WIDTH - 6, y, "32 lanes of a warp", MUTED, "end"),
        caption(WIDTH - 6, y + 120, "sectors of 32 bytes", MUTED, "end"),
    ]
    for lane in range(LANES):
        x = left + lane * lane_width
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 12}" width="{lane_width - 3:.1f}" height="20" rx="3" '
            f'fill="{colour}" fill-opacity="0.15" stroke="{colour}"/>'
        )
        byte = FLOAT * first(lane)
        place = order.index(byte // SECTOR)
        cell = sector_width / 8
        drawn = max(cell, 5)  # a float that is too narrow to see
        to = start + place * (sector_width + gap) + (byte % SECTOR // FLOAT + 0.5) * cell
        parts.append(
            f'<path d="M{x + lane_width / 2 - 1.5:.1f} {y + 33} L{to:.1f} {y + 73}" '
            f'stroke="{MUTED}" stroke-width="1"/>'
        )
        parts.append(
            f'<rect x="{to - cell / 2:.1f}" y="{y + 74}" width="{drawn:.1f}" height="26" '
            f'fill="{colour}" fill-opacity="0.8"/>'
        )
    for place in range(len(order)):
        x = start + place * (sector_width + gap)
        parts.append(
            f'<rect x="{x:.1f}" y="{y + 74}" width="{sector_width:.1f}" height="26" '
            f'fill="none" stroke="{INK}" stroke-width="1.3"/>'
        )
    moved = SECTOR * len(order)
    apart = "" if order[1] == order[0] + 1 else f", {FLOAT * first(1):,} bytes apart"
    words = f"{len(order)} sectors{apart}: {moved:,} bytes are read, {used} are used"
    parts.append(caption(left, y + 120, words, INK, "start"))
    return parts


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 300" '
        'font-family="system-ui, sans-serif" font-size="14">',
        *panel(18, "coalesced: lane i reads x[i]", LOADS["coalesced: x[i]"][0], GREEN),
        *panel(
            168,
            f"naive: lane i reads x[{ROW} * i], the first float of its row",
            LOADS["naive: x[1024 * i]"][0],
            ORANGE,
        ),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    with open("warp_addresses.svg", "w", encoding="utf-8") as file:
        file.write(draw())
    print("one load of a warp               sectors  bytes read  bytes used")
    counts = {}
    for name, (first, floats) in LOADS.items():
        sectors, used = touched(first, floats)
        counts[name] = len(sectors)
        print(f"{name:32} {len(sectors):7} {SECTOR * len(sectors):11,} {used:11}")
    by_stride = [len(touched(lambda i, s=stride: s * i, 1)[0]) for stride in range(1, 65)]
    formula = [min(LANES, -(-FLOAT * (31 * stride + 1) // SECTOR)) for stride in range(1, 65)]
    assert by_stride == formula  # the first page of chapter 06 derives this formula
    assert touched(lambda i: 0, 1) == ({0}, FLOAT)  # all lanes share one float
    assert len(touched(lambda i: i + 1, 1)[0]) == 5  # a start that is no multiple of 32 bytes
    assert counts["float4: x[4 * i]"] == 4 * counts["coalesced: x[i]"]  # four times the bytes


if __name__ == "__main__":
    main()
