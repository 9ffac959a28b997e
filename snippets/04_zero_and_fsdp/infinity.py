"""ZeRO-Infinity's arithmetic: the bandwidth that offloading needs, and what fits where.

For each byte that comes from the CPU or the NVMe, or goes there, count the FLOPs that a GPU
does in the step: the arithmetic intensity. With a peak of P FLOP/s and a bandwidth of W
bytes/s, a step that moves the bytes and then computes is busy for this share of its time:

    efficiency = intensity · W / (intensity · W + P)

(ZeRO-Infinity, arXiv 2104.07857). For a transformer of Ψ = 12·L·h² parameters, b sequences of s
tokens on each GPU, with recomputation, in 16-bit:

    FLOPs per step           2 forward + 2 recomputation + 4 backward = 8 · b · s · Ψ
    parameters, gradients    2Ψ bytes, loaded three times, and 2Ψ bytes stored: 4 · 2Ψ
    optimizer states         16Ψ bytes, read and written: 2 · 16Ψ
    activation checkpoints   2 · b · s · h bytes a layer, stored and loaded: 4 · b · s · h · L

One process, no GPU. Draws infinity.svg.
"""

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PEAK = 70e12  # FLOP/s that the paper takes a V100 to reach
H200 = 400e12  # 40% of the dense bf16 peak of an H200
S, H, LAYERS, GPUS = 1024, 8192, 128, 64
DGX2 = {"GPU": 16 * 32e9, "CPU": 1.5e12, "NVMe": 28e12}  # bytes in one DGX-2


def flops(b: float, s: int, psi: float) -> float:
    """FLOPs of one step on one GPU: forward 2, backward 4, recomputation 2 per parameter."""
    return 8 * b * s * psi


# --8<-- [start:intensity]
def intensities(b: float, s: int, h: int, layers: int) -> dict[str, float]:
    """FLOPs per byte moved, for each thing that may be kept away from the GPU."""
    psi = 12 * layers * h * h
    moved = {
        "parameters, gradients": 4 * 2 * psi,  # 3 loads and 1 store, 2 bytes each
        "optimizer states": 2 * 16 * psi,  # read and written, 16 bytes each
        "activation checkpoints": 2 * 2 * b * s * h * layers,  # stored and loaded, 2 bytes
    }
    return {what: flops(b, s, psi) / size for what, size in moved.items()}


def bandwidth(intensity: float, efficiency: float, peak: float) -> float:
    """Bytes per second for each GPU at which a step reaches this efficiency."""
    return efficiency / (1 - efficiency) * peak / intensity


# --8<-- [end:intensity]


def draw(intensity: dict[str, float], path: str) -> None:
    """Efficiency against bandwidth for each thing that may be offloaded."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "infinity", "font.size": 11})
    figure, axis = plt.subplots(figsize=(7, 3.8))
    rates = [10 ** (k / 20) for k in range(-20, 81)]  # GB/s
    colours = dict(zip(intensity, ("#0b6e99", "#c2410c", "#15803d"), strict=True))
    places = ((25, 66, "right"), (420, 55, "left"), (0.46, 50, "left"))  # of the labels
    spots = dict(zip(intensity, places, strict=True))
    for what, value in intensity.items():
        shares = [100 * value * w * 1e9 / (value * w * 1e9 + PEAK) for w in rates]
        axis.plot(rates, shares, color=colours[what], linewidth=2)
        x, y, side = spots[what]
        axis.text(x, y, what.replace(" ", "\n"), color=colours[what], ha=side, va="center")
    for rate, name, x, side in (
        (3, "one link", 2.7, "right"),
        (3 * GPUS, f"{GPUS} links", 210, "left"),
    ):
        axis.axvline(rate, color="#52525b", linestyle=":", linewidth=1.2)
        axis.text(x, 8, f"{name},\n{rate} GB/s", color="#52525b", ha=side, va="bottom")
    axis.set_xscale("log")
    axis.set_ylim(0, 104)
    axis.set_xlim(rates[0], rates[-1])
    axis.set_xlabel("bandwidth that a GPU's bytes get, GB/s")
    axis.set_ylabel("efficiency, %")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit("start this with: python infinity.py")
    small, large = (intensities(b, S, H, LAYERS) for b in (1, 2))
    closed = (2 * S, 2 * S / 4, 24 * H)  # the paper's forms: b·s, b·s/4, 24·h
    print(f"s = {S}, h = {H}; GB/s in all, on GPUs that reach 70 TFLOP/s")
    print(f"{'':24}FLOPs/byte   50% at b = 1   90% at b = 2   a link of {GPUS}")
    for (what, value), form in zip(large.items(), closed, strict=True):
        assert value == form
        half = bandwidth(small[what], 0.5, PEAK) / 1e9
        most = bandwidth(value, 0.9, PEAK) / 1e9
        link = most if "activation" in what else most / GPUS  # each GPU has its own of these
        print(f"{what:24}{value:10.0f} {half:14.1f} {most:14.1f} {link:14.1f}")

    draw(large, "infinity.svg")
    print("tokens on each GPU at which loading the parameters leaves 90% of the speed")
    machines = (
        ("16 V100, 3 GB/s each", 16, 3e9, PEAK),
        ("8 H200, PCIe 5, 50 GB/s each", 8, 50e9, H200),
        ("64 H200, PCIe 5, 50 GB/s each", 64, 50e9, H200),
    )
    for name, gpus, rate, peak in machines:
        print(f"  {name:30} {bandwidth(1, 0.9, peak) / (gpus * rate):8,.0f}")

    print("one DGX-2 (16 V100, 1.5 TB, 28 TB NVMe): parameters in billions")
    host, gpus = DGX2["CPU"] / 12, DGX2["GPU"] / 4
    assert host < gpus < 1.05 * host  # the two parts of ZeRO-2 fill both memories at once
    places = {
        "all on the GPUs (ZeRO-3)": DGX2["GPU"] / 16,
        "optimizer on the CPU, 4Ψ on GPUs": min(host, gpus),
        "all on the CPU": DGX2["CPU"] / 16,
        "all on NVMe (ZeRO-Infinity)": DGX2["NVMe"] / 16,
    }
    for where, psi in places.items():
        print(f"  {where:34} {psi / 1e9:6.0f}")


if __name__ == "__main__":
    main()
