"""Hopper keeps the sums of a product in registers, and Blackwell keeps them in tensor memory.

    python blackwell_tiles.py hopper.cu blackwell.cu

The program reads the sizes of both kernels and draws blackwell_tiles.svg. It also counts how
many bytes a product reads from shared memory. Look at the last two columns: an SM of a B200
needs 64 FLOPs for each byte of shared memory, twice as many as an SM of an H100. The TFLOP/s
are those of the datasheets. The authors of FlashAttention-4 write that both GPUs have the same
bandwidth of shared memory. Plain Python writes the SVG.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

INK, MUTED = "#1f2937", "#52525b"
BLUE, GREEN, ORANGE = "#0b6e99", "#15803d", "#c2410c"
WIDTH, HEIGHT = 760, 436
SHARED_BYTES = 128  # per clock and SM


class Machine(NamedTuple):
    name: str
    flops: float  # per second, bf16
    sms: int
    per_clock: int  # FLOPs per clock and SM


H100 = Machine("H100", 989.4e12, 132, 4096)
B200 = Machine("B200", 2250e12, 148, 8192)


# --8<-- [start:intensity]
def read(rows: int, columns: int, k: int = 16) -> int:
    """Return the bytes of bf16 factors that a product reads from one SM's shared memory."""
    return 2 * k * (rows + columns)


def intensity(rows: int, columns: int, rows_read: int, columns_read: int) -> float:
    """Return FLOPs per byte of shared memory, for the part of a product that one SM does."""
    return 2 * rows * columns * 16 / read(rows_read, columns_read)


# --8<-- [end:intensity]


def kernel_sizes(source: str) -> dict[str, int]:
    """Return the sizes of the kernel, such as BM, from the lines with constexpr int."""
    section = source[source.index("[start:constants]") : source.index("[end:constants]")]
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)\b", section)}


def centred_text(x: float, y: float, words: str, colour: str = INK, size: int = 13) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" '
        f'text-anchor="middle">{words}</text>'
    )


def framed(
    x: float, y: float, wide: float, tall: float, colour: str, opacity: float = 0.1
) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" rx="5" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}" stroke-width="1.5"/>'
    )


def arrow_along(path: str, colour: str = INK) -> str:
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5" '
        'marker-end="url(#tip)"/>'
    )


def panel(left: float, title: str, stages: int, tile: tuple[int, int]) -> list[str]:
    """Draw what both machines have: TMA's stages in shared memory, and the tensor cores."""
    rows, columns = tile
    parts = [centred_text(left + 180, 20, title, INK, 15)]
    parts += [framed(left, 34, 360, 84, BLUE, 0.05)]
    parts += [
        centred_text(left + 180, 52, f"shared memory: {stages} stages, filled by TMA", BLUE, 12)
    ]
    for i in range(stages):
        wide = (344 - 8 * (stages - 1)) / stages
        x = left + 8 + i * (wide + 8)
        parts += [framed(x, 60, wide, 50, BLUE, 0.18)]
        parts += [centred_text(x + wide / 2, 80, f"A: {rows} × 64", BLUE, 12)]
        parts += [centred_text(x + wide / 2, 98, f"B: {columns} × 64", BLUE, 12)]
    parts += [arrow_along(f"M{left + 180} 118 V148", BLUE)]
    parts += [framed(left + 90, 152, 180, 40, GREEN, 0.18)]
    parts += [centred_text(left + 180, 177, "tensor cores", GREEN, 14)]
    return parts


def draw(hopper: dict[str, int], blackwell: dict[str, int]) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif">',
        '<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="6" refY="3" '
        f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>',
    ]
    left = 8
    tile = hopper["BM"], hopper["BN"]
    parts += panel(left, "Hopper (hopper.cu)", hopper["STAGES"], tile)
    sums = tile[0] // 2 * tile[1] // 128
    for i in (0, 1):
        x = left + i * 184
        parts += [arrow_along(f"M{left + 140 + 80 * i} 192 V228", GREEN)]
        parts += [framed(x, 232, 176, 116, ORANGE, 0.06)]
        parts += [centred_text(x + 88, 251, f"warpgroup {i + 1}: 128 threads", ORANGE, 12)]
        parts += [centred_text(x + 88, 269, "start wgmma together", INK, 12)]
        parts += [framed(x + 10, 280, 156, 58, ORANGE, 0.25)]
        parts += [centred_text(x + 88, 299, f"registers: {tile[0] // 2} × {tile[1]}", INK, 12)]
        parts += [centred_text(x + 88, 317, "sums of tile t,", INK, 12)]
        parts += [centred_text(x + 88, 333, f"{sums} in each thread", INK, 12)]
        parts += [arrow_along(f"M{x + 88} 348 V382", ORANGE)]
    parts += [framed(left, 386, 360, 40, MUTED, 0.06)]
    parts += [
        centred_text(left + 180, 411, "C: the threads that multiplied also store", INK, 12)
    ]

    left = 392
    tile = blackwell["BM"], blackwell["BN"]
    parts += panel(left, "Blackwell (blackwell.cu)", blackwell["STAGES"], tile)
    parts += [framed(left, 152, 76, 40, ORANGE, 0.15)]
    parts += [centred_text(left + 38, 169, "1 thread", INK, 12)]
    parts += [centred_text(left + 38, 185, "starts", INK, 12)]
    parts += [arrow_along(f"M{left + 76} 172 H{left + 86}", ORANGE)]
    parts += [framed(left, 212, 360, 82, GREEN, 0.05)]
    parts += [centred_text(left + 96, 230, "tensor memory: 256 KiB", GREEN, 12)]
    for i in (0, 1):
        x = left + 8 + 176 * i
        parts += [framed(x, 238, 168, 48, GREEN, 0.12 + 0.2 * i)]
        parts += [centred_text(x + 84, 257, f"{tile[0]} × {tile[1]} sums", INK, 12)]
        parts += [centred_text(x + 84, 275, f"of tile t{' + 1' if i else ''}", INK, 12)]
    parts += [arrow_along(f"M{left + 264} 192 V234", GREEN)]
    parts += [arrow_along(f"M{left + 92} 286 V318", ORANGE)]
    parts += [framed(left, 322, 360, 30, ORANGE, 0.15)]
    parts += [
        centred_text(left + 180, 342, "4 warps take 32 sums at a time: tcgen05.ld", INK, 12)
    ]
    parts += [arrow_along(f"M{left + 180} 352 V382", ORANGE)]
    parts += [framed(left, 386, 360, 40, MUTED, 0.06)]
    parts += [
        centred_text(
            left + 180, 411, "C: tile t is stored while tile t + 1 is multiplied", INK, 12
        )
    ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    if len(sys.argv) != 3 or not all(Path(name).is_file() for name in sys.argv[1:]):
        sys.exit("start it as: python blackwell_tiles.py hopper.cu blackwell.cu")
    hopper, blackwell = (kernel_sizes(Path(name).read_text("utf-8")) for name in sys.argv[1:])
    bm, bn = blackwell["BM"], blackwell["BN"]

    print("read from shared memory                    bytes for    clocks to    FLOPs per byte")
    print("                                           16 of k    read  multiply   done  needed")
    clocks = {}
    products = (  # name, machine, rows and columns of one SM, rows and columns that it reads
        ("wgmma of hopper.cu", H100, 64, hopper["BN"], 64, hopper["BN"]),
        ("tcgen05.mma", B200, bm, 128, bm, 128),
        ("tcgen05.mma of blackwell.cu", B200, bm, bn, bm, bn),
        ("tcgen05.mma, cta_group::2, one SM", B200, bm, bn, bm, bn // 2),
    )
    for name, machine, rows, columns, rows_read, columns_read in products:
        moved, flops = read(rows_read, columns_read), 2 * rows * columns * 16
        reading, multiplying = moved / SHARED_BYTES, flops / machine.per_clock
        ratio = intensity(rows, columns, rows_read, columns_read)
        needed = machine.per_clock / SHARED_BYTES
        clocks[name] = reading, multiplying
        print(
            f"{name:34} {rows:3} × {columns:3} {moved:7,} {reading:6.0f} {multiplying:9.0f}"
            f" {ratio:7.1f} {needed:7.0f}"
        )
        clock = machine.flops / machine.sms / machine.per_clock
        assert 1.8e9 < clock < 1.9e9, clock  # the datasheet and the paper agree on a clock

    # if TMA's writes share the bandwidth, the accesses need twice the clocks of the reads
    _, square, ours, pair = clocks.values()
    assert square[0] == square[1]  # no reserve
    assert ours[0] < ours[1] < 2 * ours[0] and 2 * pair[0] <= pair[1]  # only a pair has enough

    ratios = {}
    print("\nread from L2, 64 of k          KiB per block  FLOPs per byte  TB/s at the peak")
    steps = (
        ("hopper.cu", H100, hopper["BM"], hopper["BN"], hopper["BN"]),
        ("hopper.cu's tile on a B200", B200, hopper["BM"], hopper["BN"], hopper["BN"]),
        ("blackwell.cu without multicast", B200, bm, bn, bn),
        ("blackwell.cu", B200, bm, bn, bn // blackwell["BLOCKS"]),
    )
    for name, machine, rows, columns, columns_read in steps:
        moved = read(rows, columns_read, 64)
        ratio = ratios[name] = 2 * rows * columns * 64 / moved
        print(
            f"{name:31} {moved / 1024:12.0f} {ratio:15.1f} {machine.flops / ratio / 1e12:17.1f}"
        )
    assert ratios["blackwell.cu"] == 2 * ratios["hopper.cu"]  # half of the bytes for each FLOP
    Path("blackwell_tiles.svg").write_text(draw(hopper, blackwell), encoding="utf-8")


if __name__ == "__main__":
    main()
