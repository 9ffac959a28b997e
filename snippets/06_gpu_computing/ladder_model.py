"""Why each rung of the matrix ladder is faster: clocks of loading against multiplying.

An SM of an H200 multiplies and adds for 4 warps per clock (128 lanes), so one multiply-add of
a warp needs a quarter of a clock. Its L1 cache and shared memory deliver at most 128 bytes per
clock: one line of L1, or one word of 4 bytes from each of 32 banks. One such delivery is a
pass. A load from global memory needs one pass for each line that the warp touches. A load from
shared memory needs as many passes as its fullest bank has different words. A 16-byte load is
delivered to 8 lanes in a pass, or to 16 lanes if neighbours (lanes 2i and 2i + 1, or lanes i
and i + 2) want the same address, as an engineer of NVIDIA describes it for compute capability
7. The larger of the two numbers of clocks bounds the speed of a rung.

Look first at the passes for square tiles of a lane. From 8 x 8 on, loading is not the longer
part even if no two lanes want the same address. Then compare the bound of each rung with the
speed that ./sgemm measured on an H200, which is read from its transcript. A simpler rule
counts the bytes of every lane, 128 in a clock. The measurements of two rungs refute it, because
the same word for several lanes needs only one pass. The last lines predict how much of the time
double_buffer.cu multiplies if it loads and multiplies in turns. Draws ladder_model.svg.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

SMS, GHZ = 132, 1.98  # H200
PEAK = SMS * 128 * 2 * GHZ / 1000  # TFLOP/s
LANES = range(32)
LATENCY = 1000  # clocks from a request to its data, assumed by double_buffer.cu
# TFLOP/s, 4096 x 4096 x 4096: cuBLAS, then the rungs
RECORDED = Path(__file__).with_name("sgemm.cuda.txt").read_text("utf-8")
assert "NVIDIA H200" in RECORDED.partition("\n")[0]
(_, CUBLAS), *RUNGS = re.findall(r"^(\w+) +≈[\d.]+ ms +≈([\d.]+) TFLOP/s", RECORDED, re.M)
CUBLAS = float(CUBLAS)
AHEAD = Path(__file__).with_name("double_buffer.cuda.txt").read_text("utf-8")
assert "NVIDIA H200" in AHEAD.partition("\n")[0]
ONE_BLOCK = {  # TFLOP/s of double_buffer.cu with one block on an SM
    name: float(speed)
    for name, speed in re.findall(r"^(.{8}): ≈([\d.]+) TFLOP/s with one block", AHEAD, re.M)
}
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
    """Where the square of lane i begins in a column of `a`, in rungs 7 and 8."""
    return (i // 8 * 2 + i // 2 % 2) * 4


def across(i: int) -> int:
    """Where the square of lane i begins in a row of `b`, in rungs 7 and 8."""
    return (i // 4 % 2 * 2 + i % 2) * 4


def rungs() -> dict[str, tuple[int, int]]:
    """Return the passes of loading and the multiply-adds of a warp for each rung.

    The loads are those of the machine code. ptxas joins the loads of four neighbouring floats
    if it can prove that they are aligned.
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


# --8<-- [start:lane_tiles]
def lane_tile(rows: int, columns: int) -> tuple[int, int, float]:
    """Clocks of a warp for one step of k if each lane computes `rows` x `columns` sums.

    Returns the passes of loading if neighbouring lanes share addresses, the passes if they do
    not, and the clocks of multiplying. All loads have 16 bytes.
    """
    of_a, of_b = rows // 4, columns // 4  # loads of each lane
    shared = of_a * passes(down, 4) + of_b * passes(across, 4)
    unshared = (of_a + of_b) * passes(lambda i: 4 * i, 4)  # all lanes want different words
    return shared, unshared, rows * columns / 4


# --8<-- [end:lane_tiles]


def in_turns() -> tuple[int, float]:
    """Passes and clocks of multiplying of one warp for a step of 16 of k in double_buffer.cu.

    A thread has 4 x 4 sums. ptxas joins four k of a row of a[64][20] into one load.
    """
    return (
        16 * passes(lambda i: i // 16 * 4 * 20, 4) + 16 * passes(lambda i: i % 16 * 4, 4),
        16 * 4 * 4 / 4,
    )


def one_byte_bound(bytes_per_fma: float) -> float:
    """TFLOP/s if shared memory had to deliver these bytes to every lane, 128 in a clock."""
    return PEAK / max(1, bytes_per_fma)


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
    print("tile of a lane  sums  passes: neighbours share  or do not  clocks of multiplying")
    tiles = {(t, u): lane_tile(t, u) for t, u in ((4, 4), (8, 8), (8, 16), (16, 16))}
    for (rows, columns), (shared, unshared, multiplying) in tiles.items():
        print(
            f"{f'{rows} x {columns}':14} {rows * columns:5} {shared:24} {unshared:11}"
            f" {multiplying:22g}"
        )
    # loading is never the longer part from 8 x 8 on; 4 x 4 needs neighbours that share
    assert [t for t, (_, unshared, fma) in tiles.items() if unshared > fma] == [(4, 4)]
    assert tiles[4, 4][0] == tiles[4, 4][2]

    print(f"\npeak: {SMS} SMs x 128 lanes x 2 FLOP x {GHZ:.2f} GHz = {PEAK:.1f} TFLOP/s")
    print("rung              loading : multiplying (clocks)  bound  measured  measured / bound")
    bounds = {}
    # a warp that reads every second float touches two lines, and of every fourth float four
    assert [lines(lambda i, step=step: i * step) for step in (1, 2, 4)] == [1, 2, 4]
    # counted by hand from the addresses; the range below does not see every wrong count
    assert [loading for loading, _ in rungs().values()] == [33, 2, 48, 40, 160, 20, 8, 8]
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

    print("\nIf every lane's bytes counted, 128 in a clock:  bytes per FMA  bound  measured")
    for name, size in (("3 shared", 8.0), ("4 tile_1d", 4.5)):
        assert MEASURED[name] > one_byte_bound(size)  # so this rule is refuted
        print(f"{name:47} {size:14g} {one_byte_bound(size):6.2f} {MEASURED[name]:9.2f}")

    loading, fma = in_turns()
    assert loading > fma
    clocks = 8 * loading  # of a block of 8 warps
    flop = 2 * 64 * 64 * 16
    took = {name: flop * SMS * GHZ / speed / 1e3 for name, speed in ONE_BLOCK.items()}
    predicted = clocks / (clocks + LATENCY)
    measured = took["4 stages"] / took["in turns"]
    assert predicted < measured < 1
    print(
        f"\ndouble_buffer.cu, a step of one block: {clocks} passes, {8 * fma:g} clocks of FMAs"
    )
    print(f"bound with many blocks: {bound(loading, 4 * fma):.1f} TFLOP/s")
    print(f"in turns, latency {LATENCY}: predicted to multiply {predicted:.0%} of the time")
    print(
        f"measured: {took['4 stages']:.0f} of {took['in turns']:.0f} clocks, which is"
        f" {measured:.0%}; the others are {took['in turns'] - took['4 stages']:.0f}"
    )
    draw(bounds)


if __name__ == "__main__":
    main()
