"""Why each rung of the matrix ladder is faster: clocks of loading against multiplying.

An SM multiplies and adds for 4 warps per clock (128 lanes): a quarter of a clock for an FMA of
one warp. Its L1 and shared memory answer one request per clock with at most 128 bytes: one line
of 128 bytes, or one word from each of 32 banks. So a warp's load takes as many passes as it
touches lines, or as its fullest bank has different words; a 16-byte load is answered for 8
lanes at a time, or for 16 where neighbours (lanes 2i and 2i + 1, or i and i + 2) want the same,
as NVIDIA's engineers describe it for compute capability 7. The larger of the two clock counts
bounds the speed. Beside it stands what ./sgemm measured on an H200, by its transcript. Draws
ladder_model.svg.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

SMS, GHZ = 132, 1.98  # H200
PEAK = SMS * 128 * 2 * GHZ / 1000  # TFLOP/s
LANES = range(32)
# TFLOP/s, 4096 x 4096 x 4096: cuBLAS, then the rungs
RECORDED = Path(__file__).with_name("sgemm.cuda.txt").read_text("utf-8")
assert "NVIDIA H200" in RECORDED.partition("\n")[0]
(_, CUBLAS), *RUNGS = re.findall(r"^(\w+) +≈[\d.]+ ms +≈([\d.]+) TFLOP/s", RECORDED, re.M)
CUBLAS = float(CUBLAS)
MEASURED = {f"{n} {name}": float(speed) for n, (name, speed) in enumerate(RUNGS, 1)}


def lines(address) -> int:
    """Passes of a global load: lines of 128 bytes that a warp touches. Addresses in floats."""
    return len({address(lane) // 32 for lane in LANES})


def passes(address, width: int = 1) -> int:
    """Passes of a load of `width` floats from shared memory."""
    assert all(isinstance(address(lane), int) for lane in LANES)  # of floats, not of bytes
    size = 32
    if width == 4:
        want = [address(lane) for lane in LANES]
        paired = any(all(want[i] == want[i ^ step] for i in LANES) for step in (1, 2))
        size = 16 if paired else 8
    total = 0
    for start in range(0, 32, size):
        words = {address(lane) + i for lane in range(start, start + size) for i in range(width)}
        banks = [word % 32 for word in words]
        total += max(banks.count(bank) for bank in set(banks))
    return total


# --8<-- [start:rungs]
def down(i: int) -> int:
    """Where the square of lane i begins in its column of a, in the last two rungs."""
    return (i // 8 * 2 + i // 2 % 2) * 4


def across(i: int) -> int:
    """The same in its row of b."""
    return (i // 4 % 2 * 2 + i % 2) * 4


def rungs() -> dict[str, tuple[int, int]]:
    """Passes of loading and multiply-adds of a warp, for the loads that ptxas makes of a rung.

    It joins loads of four neighbouring floats by itself where it sees that they are aligned.
    """
    k = 4096
    return {
        "1 naive": (lines(lambda i: i * k) + lines(lambda i: 0), 1),
        "2 coalesced": (lines(lambda i: 0) + lines(lambda i: i), 1),
        # 32 steps of k: a[y][k .. k + 3] for the whole warp, b[k][x]
        "3 shared": (8 * passes(lambda i: 0, 4) + 32 * passes(lambda i: i), 32),
        # 8 steps: 8 rows of a, four k at a time; b[k][x]
        "4 tile_1d": (16 * passes(lambda i: 0, 4) + 8 * passes(lambda i: i), 64),
        # 8 steps: 8 rows of a[128][8], four k at a time; twice 4 of b[k][8 * x]
        "5 tile_2d": (
            16 * passes(lambda i: i // 16 * 64, 4) + 16 * passes(lambda i: i % 16 * 8, 4),
            512,
        ),
        # 1 step: twice 4 of a[k][8 * y], twice 4 of b[k][8 * x]
        "6 vectorised": (
            2 * passes(lambda i: i // 16 * 8, 4) + 2 * passes(lambda i: i % 16 * 8, 4),
            64,
        ),
        # 1 step of 64 x 32 per warp: twice 4 of a, twice 4 of b
        "7 warp_tile": (2 * passes(down, 4) + 2 * passes(across, 4), 64),
        "8 double_buffered": (2 * passes(down, 4) + 2 * passes(across, 4), 64),
    }


# --8<-- [end:rungs]


def bound(loading: int, fma: int) -> float:
    """TFLOP/s, when loading and multiplying overlap and the slower decides."""
    return PEAK * (fma / 4) / max(loading, fma / 4)


def draw(bounds: dict[str, float]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ladder_model", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.9))
    rows = [*bounds, "cuBLAS"]
    ours = [*bounds.values(), PEAK]
    theirs = [*MEASURED.values(), CUBLAS]
    for y, (bound, measured) in enumerate(zip(ours, theirs, strict=True)):
        axes.plot([measured, bound], [y, y], color="#52525b", linewidth=1)
        axes.text(95, y, f"{measured / bound:.0%}", color="#c2410c", va="center", ha="left")
    axes.plot(ours, range(9), "o", color="#0b6e99")
    axes.plot(theirs, range(9), "s", color="#c2410c")
    axes.axvline(PEAK, color="#0b6e99", linewidth=0.8, linestyle=":")
    axes.text(PEAK, -0.7, f"peak {PEAK:.1f}", color="#0b6e99", ha="right")
    axes.text(bounds["2 coalesced"] * 1.2, 1, "bound", color="#0b6e99", va="center")
    axes.text(
        MEASURED["2 coalesced"] / 1.2, 1, "measured", color="#c2410c", va="center", ha="right"
    )
    axes.text(95, -0.7, "of the bound", color="#c2410c")
    axes.set_xscale("log")
    axes.set_xlim(0.3, 85)
    axes.set_ylim(8.5, -0.5)
    axes.set_xticks([0.5, 1, 3, 10, 30], ["0.5", "1", "3", "10", "30"])
    axes.set_yticks(range(9), rows)
    axes.set_xlabel("TFLOP/s in fp32, H200")
    axes.spines[["top", "right"]].set_visible(False)
    axes.minorticks_off()
    figure.subplots_adjust(left=0.27, right=0.75, top=0.9, bottom=0.15)
    figure.savefig("ladder_model.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print(f"peak: {SMS} SMs x 128 lanes x 2 FLOP x {GHZ:.2f} GHz = {PEAK:.1f} TFLOP/s")
    print("rung              loading : multiplying (clocks)  bound  measured  measured / bound")
    bounds = {}
    for name, (loading, fma) in rungs().items():
        bounds[name] = bound(loading, fma)
        share = MEASURED[name] / bounds[name]
        low, high = (0.9, 1.1) if name == "1 naive" else (0.5, 0.8)
        assert low < share < high, (name, share)
        print(
            f"{name:17} {loading:7} : {fma / 4:<20g} {bounds[name]:8.2f} {MEASURED[name]:9.2f}"
            f" {share:17.0%}"
        )
    print(f"{'cuBLAS':48} {PEAK:8.2f} {CUBLAS:9.2f} {CUBLAS / PEAK:17.0%}")
    # the lanes of the last two rungs in another order: row by row
    places = {(down(lane), across(lane)) for lane in LANES}
    assert places == {(lane // 4 * 4, lane % 4 * 4) for lane in LANES}
    row_by_row = 2 * passes(lambda i: i // 4 * 4, 4) + 2 * passes(lambda i: i % 4 * 4, 4)
    assert (row_by_row, rungs()["7 warp_tile"][0]) == (12, 8)
    print(f"warp_tile with lanes row by row: {row_by_row} clocks of loading")
    draw(bounds)


if __name__ == "__main__":
    main()
