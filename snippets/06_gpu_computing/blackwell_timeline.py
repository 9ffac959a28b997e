"""Two tiles of sums in tensor memory let a block store one tile while it multiplies the next.

    python blackwell_timeline.py blackwell.cu

The program reads the tile of the kernel and computes when each warp of a block works, with one
and with two tiles of sums. It is a calculation, not a measurement: a B200 multiplies 8,192
FLOPs per clock and SM, and each SM stores with its fraction of 8 TB/s. Loads are assumed to
arrive in time. Look at the percentages: with a short K, storing takes more than a third of
the time, and a second tile of sums hides it. The program draws blackwell_timeline.svg.
"""

import re
import sys
from pathlib import Path
from typing import NamedTuple

INK, MUTED = "#1f2937", "#52525b"
GREEN, ORANGE, BLUE = "#15803d", "#c2410c", "#0b6e99"
FLOPS, SMS, BANDWIDTH, PER_CLOCK = 2250e12, 148, 8e12, 8192  # B200, dense bf16
CLOCK = FLOPS / SMS / PER_CLOCK  # at which both numbers hold
TILES, DRAWN = 32, 4


class Tile(NamedTuple):
    begin: float  # of the products, in clocks
    end: float
    taken: float  # the storing warps have read and stored all sums


# --8<-- [start:schedule]
def schedule(tiles: int, halves: int, multiply: float, store: float) -> list[Tile]:
    """Return when each tile is multiplied and stored, with `halves` tiles of sums."""
    done: list[Tile] = []
    for t in range(tiles):
        previous = done[-1] if done else Tile(0, 0, 0)
        free = done[t - halves].taken if t >= halves else 0  # sums_empty
        begin = max(previous.end, free)
        end = begin + multiply  # sums_full
        done.append(Tile(begin, end, max(end, previous.taken) + store))
    return done


# --8<-- [end:schedule]


def clocks(bm: int, bn: int, k: int) -> tuple[float, float]:
    """Return the clocks that one tile needs for its products and for its stores."""
    return 2 * bm * bn * k / PER_CLOCK, 4 * bm * bn / (BANDWIDTH / SMS / CLOCK)


def bar(x: float, y: float, wide: float, colour: str, words: str, opacity: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="26" rx="3" fill="{colour}" '
        f'fill-opacity="{opacity}" stroke="{colour}"/>'
        f'<text x="{x + wide / 2:.1f}" y="{y + 18}" fill="{INK}" font-size="12" '
        f'text-anchor="middle">{words}</text>'
    )


def draw(multiply: float, store: float) -> str:
    wide, left = 760, 118
    plans = [(h, schedule(DRAWN, h, multiply, store)) for h in (1, 2)]
    lead = 14  # the loads of a tile begin a little before its products
    scale = (wide - left - lead - 8) / plans[0][1][-1].taken
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} 316" '
        'font-family="system-ui, sans-serif">'
    ]
    for number, (halves, plan) in enumerate(plans):
        top = 6 + number * 152
        title = "One tile of sums" if halves == 1 else "Two tiles of sums"
        parts.append(f'<text x="4" y="{top + 16}" fill="{INK}" font-size="14">{title}</text>')
        for row, name in enumerate(("TMA loads", "products", "storing warps")):
            y = top + 28 + 34 * row
            parts.append(
                f'<text x="{left - 8}" y="{y + 18}" fill="{MUTED}" font-size="12" '
                f'text-anchor="end">{name}</text>'
            )
        for t, tile in enumerate(plan):
            opacity = 0.35 if t % halves else 0.15
            place = f"tile {t}" + (f", sums {t % 2}" if halves == 2 else "")
            x, y = left + lead + tile.begin * scale, top + 28
            parts.append(bar(x - lead, y, multiply * scale, BLUE, f"tile {t}", 0.12))
            parts.append(bar(x, y + 34, multiply * scale, GREEN, place, opacity))
            begin = left + lead + (tile.taken - store) * scale
            parts.append(bar(begin, y + 68, store * scale, ORANGE, f"tile {t}", opacity))
    y = 308
    parts.append(
        f'<text x="{wide - 8}" y="{y}" fill="{MUTED}" font-size="12" text-anchor="end">'
        "time →</text></svg>\n"
    )
    return "\n".join(parts)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("start it as: python blackwell_timeline.py blackwell.cu")
    source = Path(sys.argv[1]).read_text("utf-8")
    bm, bn = (int(re.search(rf"\b{name} = (\d+)", source)[1]) for name in ("BM", "BN"))
    print(f"{bm} × {bn} sums, {TILES} tiles for each block: fraction of time with products")
    print("   K  clocks to multiply  clocks to store  one tile of sums  two tiles of sums")
    for k in (512, 1024, 4096):
        multiply, store = clocks(bm, bn, k)
        fractions = []
        for halves in (1, 2):
            plan = schedule(TILES, halves, multiply, store)
            for before, tile in zip(plan, plan[halves:], strict=False):
                assert (
                    tile.begin >= before.taken
                )  # sums are not overwritten before they are read
            fractions.append(TILES * multiply / plan[-1].taken)
            slower = max(multiply, store) if halves == 2 else multiply + store
            last = multiply + store - slower
            assert abs(plan[-1].taken - (TILES * slower + last)) < 1e-6
        one, two = (f"{100 * fraction:.0f}%" for fraction in fractions)
        print(f"{k:4} {multiply:19,.0f} {store:16,.0f} {one:>17} {two:>18}")
    Path("blackwell_timeline.svg").write_text(draw(*clocks(bm, bn, 1024)), encoding="utf-8")


if __name__ == "__main__":
    main()
