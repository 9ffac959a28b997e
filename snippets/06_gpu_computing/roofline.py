"""The roofline says how fast an operation can be at most: FLOPs or bytes limit it.

An operation does F FLOPs and moves B bytes. On a device with P FLOP/s and W bytes per second,
it takes at least max(F / P, B / W) seconds. If its intensity F / B is larger than P / W, the
FLOPs decide. FLOPs and bytes are counted for bf16, and every tensor is read or written once.
Look at the column `bound by`. The last lines show what a lower clock changes, and what a
kernel loses if it does not load and compute at the same time. The program draws roofline.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

# dense bf16 TFLOP/s (RTX 3060: fp32) and GB/s, from the data sheets; for 2:4 sparsity the data
# sheets print twice as many TFLOP/s
DEVICES = {"A100 80 GB": (312, 2039), "H100 SXM": (989, 3350), "H200": (989, 4800),
           "B200": (2250, 8000), "RTX 3060, fp32": (12.7, 360)}  # fmt: skip


# --8<-- [start:operations]
def matmul(m: int, n: int, k: int) -> tuple[float, float]:
    """FLOPs and bytes of [m, k] @ [k, n] in bf16: a multiply and an add for each m·n·k."""
    return 2 * m * n * k, 2 * (m * k + k * n + m * n)


def operations() -> dict[str, tuple[float, float]]:
    """FLOPs and bytes of operations, in bf16."""
    n = 2**24
    return {
        "vector add": (n, 6 * n),  # two reads and a write of 2 bytes
        "softmax": (5 * n, 4 * n),  # max, subtract, exp, add, divide
        "decode, batch 1": matmul(1, 8192, 8192),  # one token through one weight
        "decode, batch 64": matmul(64, 8192, 8192),
        "matmul 256": matmul(256, 256, 256),
        "matmul 1024": matmul(1024, 1024, 1024),
        "matmul 8192": matmul(8192, 8192, 8192),
    }


def attainable(intensity: float, tflops: float, gb: float) -> float:
    """The highest TFLOP/s that are possible with `intensity` FLOPs per byte."""
    return min(tflops, intensity * gb / 1000)


# --8<-- [end:operations]


def ridge(tflops: float, gb: float) -> float:
    """The intensity in FLOPs per byte from which on the roof is flat."""
    return 1000 * tflops / gb


# --8<-- [start:clock]
def least_seconds(flops: float, moved: float, mhz: float) -> float:
    """The least time on an H200 whose SMs run at `mhz`. The clock of its memory stays."""
    per_clock = 132 * 4096  # bf16 FLOPs of the tensor cores of 132 SMs
    return max(flops / (per_clock * mhz * 1e6), moved / 4800e9)


# --8<-- [end:clock]


def timeline(load: float, compute: float, pieces: int, buffers: int) -> float:
    """The time of a kernel that loads its data in pieces and computes with each piece.

    A piece is loaded into a buffer. The buffer is free again when the piece was computed.
    """
    loaded, computed = 0.0, [0.0] * buffers  # when the last `buffers` pieces were computed
    for _ in range(pieces):
        loaded = max(loaded, computed[-buffers]) + load
        computed.append(max(loaded, computed[-1]) + compute)
    return computed[-1]


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "roofline", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 5))
    figure.subplots_adjust(left=0.105, right=0.62, bottom=0.11, top=0.98)
    colours = {"B200": "#7c3aed", "H100 SXM": "#0b6e99", "A100 80 GB": "#15803d"}
    left, right, roofs = 0.08, 10000, {}
    for name, colour in colours.items():
        tflops, gb = DEVICES[name]
        corner = ridge(tflops, gb)
        roofs[name] = [left * gb / 1000, tflops, tflops]
        assert math.isclose(tflops / corner, gb / 1000)  # the slope ends at the corner
        axes.plot([left, corner, right], roofs[name], color=colour, lw=2)
        style = {"color": colour, "va": "center", "clip_on": False}
        axes.text(left * 0.85, left * gb / 1000, name.split()[0], ha="right", **style)
        axes.text(right * 1.2, tflops, f"{tflops:,} TFLOP/s, {gb:,} GB/s", fontsize=11, **style)
    offsets = {"decode, batch 1": (14, -17), "decode, batch 64": (14, -17),
               "matmul 1024": (-2, -13), "matmul 8192": (-42, 12)}  # fmt: skip
    low, _, top = roofs["H100 SXM"]
    for name, (flops, moved) in operations().items():
        x, y = flops / moved, attainable(flops / moved, *DEVICES["H100 SXM"])
        assert math.isclose(y, min(top, x * low / left)), "the point is on the drawn roof"
        axes.plot(x, y, "o", color="#c2410c", markersize=6)
        axes.annotate(
            name, (x, y), textcoords="offset points", xytext=offsets.get(name, (14, -8)),
            va="center", color="#c2410c", fontsize=11,
        )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlim=(0.008, right), ylim=(0.1, 5000))
    axes.set_xticks([0.1, 1, 10, 100, 1000, 10000])
    axes.set(xlabel="intensity (FLOPs per byte)", ylabel="attainable TFLOP/s in bf16")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig("roofline.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("device            TFLOP/s    GB/s   ridge (FLOPs per byte)")
    for name, (tflops, gb) in DEVICES.items():
        print(f"{name:15} {tflops:9} {gb:7} {ridge(tflops, gb):9.1f}")
    print("operation in bf16    FLOP/B   H100: bound by   least time   share of peak")
    tflops, gb = DEVICES["H100 SXM"]
    for name, (flops, moved) in operations().items():
        intensity = flops / moved
        bound = "compute" if intensity > ridge(tflops, gb) else "memory"
        times = {"compute": flops / (tflops * 1e12), "memory": moved / (gb * 1e9)}
        seconds = max(times.values())
        assert times[bound] == seconds, "the longer time decides"
        share = attainable(intensity, tflops, gb) / tflops
        assert abs(seconds * attainable(intensity, tflops, gb) * 1e12 / flops - 1) < 1e-9
        print(f"{name:18} {intensity:8.2f}   {bound:>14} {1e6 * seconds:9.2f} µs {share:14.2%}")
    for b in (1, 64, 319):  # the formulas of the text
        assert abs(matmul_intensity(b) / (b / (1 + 2 * b / 8192)) - 1) < 1e-12
    for n in (256, 1024, 8192):
        flops, moved = matmul(n, n, n)
        assert abs(flops / moved / (n / 3) - 1) < 1e-12
    # a square product has n / 3 FLOPs per byte, so it reaches the ridge at n = 3 P / W
    for name, (tflops, gb) in DEVICES.items():
        if "fp32" not in name:
            n = math.ceil(3000 * tflops / gb)
            below, here = (matmul(m, m, m) for m in (n - 1, n))
            assert below[0] / below[1] < ridge(tflops, gb) <= here[0] / here[1]
            print(f"{name}: square products are bound by compute from n = {n}")
    batch = next(b for b in range(1, 10**5) if matmul_intensity(b) > 1000 * 989 / 3350)
    assert matmul_intensity(batch - 1) < 1000 * 989 / 3350 < matmul_intensity(batch)
    print(f"H100: a product with one 8192 × 8192 weight, from {batch} tokens at a time")
    both = 1.0  # at the ridge, loading takes as long as computing
    for buffers in (1, 2):
        took = timeline(both / 64, both / 64, 64, buffers)
        print(f"at the ridge, 64 pieces, {buffers} buffer{'s'[: buffers - 1]}: "
              f"{took:.2f} times the bound")  # fmt: skip
    assert abs(timeline(0.01, 0.03, 100, 1) - (1 + 3)) < 1e-9  # without overlap: the sum
    assert abs(timeline(0.01, 0.03, 100, 2) - 3.01) < 1e-9  # the larger, and the first load
    assert abs(timeline(0.03, 0.01, 100, 2) - 3.01) < 1e-9
    clocks(1980, 1410)
    draw()


def clocks(fast: int, slow: int) -> None:
    """Print how much slower three operations are on an H200 with a lower clock."""
    assert abs(132 * 4096 * 1.83e9 / 989e12 - 1) < 0.001  # the clock of the data sheet
    low, high = (132 * 4096 * mhz * 1e6 / 4800e9 for mhz in (slow, fast))
    assert low < 512 / 3 < high  # the second product is bound by compute at `slow` only
    for name, (flops, moved) in {
        "matmul 8192": matmul(8192, 8192, 8192),
        "matmul 512": matmul(512, 512, 512),
        "vector add": operations()["vector add"],
    }.items():
        times = [least_seconds(flops, moved, mhz) for mhz in (fast, slow)]
        print(
            f"H200 at {slow} in place of {fast} MHz: {name:11} takes "
            f"{times[1] / times[0]:.2f} times as long"
        )


def matmul_intensity(tokens: int) -> float:
    flops, moved = matmul(tokens, 8192, 8192)
    return flops / moved


if __name__ == "__main__":
    main()
