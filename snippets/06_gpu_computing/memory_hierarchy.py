"""A picture of the memories of an H100 or H200, from the registers to the host.

Each level is larger and slower than the level above it. The program computes what the data
sheets do not say: the rate of all registers and of all shared memories, from the number of
SMs and their clock. It checks this arithmetic against numbers that the data sheets do say.
Look at the last column: how long does it take to move the same 32 MiB through each level?

Plain Python writes the SVG, so the program runs without any package.
"""

from dataclasses import dataclass

SMS, UNITS, BANKS, THREADS = 132, 128, 32, 2048  # H100 SXM and H200; three of them per SM
CLOCK = 1.98e9  # Hz, the highest clock of the SMs
PIECE = 32 * 2**20  # bytes that each level moves in the last column
WIDTH = 720
INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE, VIOLET = "#0b6e99", "#15803d", "#c2410c", "#7c3aed"


# --8<-- [start:levels]
@dataclass
class Level:
    name: str
    size: str  # bytes, as a label
    rate: float  # bytes per second, of the whole GPU
    source: str


def levels() -> list[Level]:
    """The memories of an H200, the fastest first."""
    fma = (3 + 1) * 4  # bytes: an FMA reads three numbers of 4 bytes and writes one
    pcie = 32e9 * 16 * 128 / 130 / 8  # 16 lanes of 32 GT/s; 128 of 130 bits are data
    return [
        Level("registers", per_sm(256), SMS * UNITS * fma * CLOCK, "computed"),
        Level("shared memory + L1", per_sm(256), SMS * BANKS * 4 * CLOCK, "computed"),
        Level("L2 cache", "50 MB", 9.8e12, "measured"),  # by gpu-benches, see the page
        Level("HBM", "141 GB", 4.8e12, "data sheet"),  # H100: 80 GB, 3.35e12
        Level("NVLink, one way", "other GPUs", 18 * 25e9, "18 links of 25 GB/s"),
        Level("PCIe 5.0, one way", "host memory", pcie, "computed"),
    ]


# --8<-- [end:levels]


def per_sm(kib: int) -> str:
    return f"{SMS * kib / 1024:.0f} MiB"


def bytes_per_second(rate: float) -> str:
    if rate >= 1e14:
        return f"{rate / 1e12:.0f} TB/s"
    return f"{rate / 1e12:.1f} TB/s" if rate >= 1e12 else f"{rate / 1e9:.0f} GB/s"


def caption(x: float, y: float, words: str, colour: str = INK, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, words: str, colour: str) -> str:
    frame = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{colour}" '
        f'fill-opacity="0.1" stroke="{colour}" stroke-width="1.5"/>'
    )
    return frame + caption(x + width / 2, y + height / 2 + 5, words, colour)


def left(x: float, y: float, words: str, colour: str) -> str:
    return caption(x, y, words, colour, "start")


def both_ways(x: float, top: float, bottom: float, thick: float) -> str:
    """An arrow in both directions: bytes are read and written."""
    tips = 'marker-start="url(#tip)" marker-end="url(#tip)"'
    return (
        f'<path d="M{x} {top + 6} V{bottom - 6}" stroke="{ORANGE}" stroke-width="{thick}" '
        f"{tips}/>"
    )


def draw(rows: list[Level]) -> str:
    """The SVG: the SMs above, the memories that they share below, rates at the arrows."""
    tip = f'<path d="M0 0L9 5L0 10z" fill="{ORANGE}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 500" '
        'font-family="system-ui, sans-serif" font-size="14">',
        '<defs><marker id="tip" markerWidth="9" markerHeight="10" refX="4" refY="5" '
        f'markerUnits="userSpaceOnUse" orient="auto-start-reverse">{tip}</marker></defs>',
        left(16, 18, "GPU: 132 SMs", INK),
        box(16, 26, 430, 176, "", MUTED),
        left(28, 46, "SM 0", MUTED),
        box(28, 54, 236, 28, "128 fp32 units, 4 tensor cores", INK),
        both_ways(146, 82, 106, 5),
        box(28, 106, 236, 28, "registers, 256 KiB", BLUE),
        both_ways(146, 134, 158, 3.5),
        box(28, 158, 236, 32, "shared memory + L1, 256 KiB", BLUE),
    ]
    for n, name in enumerate(("SM 1", "SM 2", "…", "SM 131")):
        parts.append(box(274 + 42 * n, 54, 38, 136, "", MUTED))
        parts.append(caption(293 + 42 * n, 126, name.replace("SM ", ""), MUTED))
    parts += [
        both_ways(231, 202, 236, 3),
        box(16, 236, 430, 36, f"L2 cache, {rows[2].size}", GREEN),
        both_ways(231, 272, 306, 2.2),
        box(16, 306, 430, 36, f"HBM (device memory), {rows[3].size}", VIOLET),
        both_ways(108, 342, 394, 1.6),
        both_ways(354, 342, 394, 1.2),
        box(16, 394, 190, 36, "NVLink to other GPUs", MUTED),
        box(256, 394, 190, 36, "PCIe to the host", MUTED),
    ]
    for row, y in zip(rows[:4], (99, 151, 224, 294), strict=True):
        parts.append(left(466, y, bytes_per_second(row.rate), ORANGE))
        parts.append(left(556, y, row.source, MUTED))
    parts.append(left(120, 373, bytes_per_second(rows[4].rate), ORANGE))
    parts.append(left(366, 373, bytes_per_second(rows[5].rate), ORANGE))
    parts.append(left(466, 373, "in one direction", MUTED))
    parts += [
        left(466, 18, "rate of the whole GPU", ORANGE),
        left(16, 464, "An H100 has the same SMs and the same L2 cache.", MUTED),
        left(16, 486, "Its HBM has 80 GB and moves 3.35 TB/s.", MUTED),
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    rows = levels()
    print("level                where         bytes per second   time for 32 MiB")
    for row in rows:
        rate = bytes_per_second(row.rate)
        took = 1e6 * PIECE / row.rate
        print(f"{row.name:20} {row.size:13} {rate:>16} {took:14.2f} µs")
    # each level is slower than the one above it
    assert [row.rate for row in rows] == sorted((row.rate for row in rows), reverse=True)

    # the arithmetic that gives the first two rates also gives numbers of the data sheet
    fp32 = 2 * SMS * UNITS * CLOCK
    assert abs(fp32 / 67e12 - 1) < 0.005
    assert rows[0].rate == 8 * fp32  # 16 bytes for the two FLOPs of an FMA
    assert 2 * rows[4].rate == 900e9  # the data sheet counts both directions of NVLink
    print(f"fp32: {SMS} SMs × {UNITS} units × 2 FLOPs × 1.98 GHz = {fp32 / 1e12:.1f} TFLOP/s")

    threads = SMS * THREADS
    registers = SMS * 256 * 1024 // 4
    assert registers == SMS * 65536 and registers // threads == 32
    print(f"{threads:,} threads fit, {registers // threads} registers for each of them")
    for name, rate in (("H100", 3.35e12), ("H200", 4.8e12)):
        in_flight = rate * 0.5e-6  # Little's law, for a latency of half a microsecond
        print(
            f"{name}: {in_flight / 1e6:.1f} MB in flight at 0.5 µs, "
            f"{in_flight / threads:.1f} bytes for each thread"
        )
    with open("memory_hierarchy.svg", "w", encoding="utf-8") as file:
        file.write(draw(rows))


if __name__ == "__main__":
    main()
