"""Compute the bandwidth that offloading needs, and how many parameters fit where.

The arithmetic intensity of an offload is the number of FLOPs that a GPU computes in a step,
divided by the bytes that move between the GPU and the host or the NVMe. A GPU reaches P
FLOP/s, and its bytes move at W bytes/s. If nothing overlaps, the GPU computes for this
fraction of a step:

    efficiency = intensity · W / (intensity · W + P)

The formulas are those of ZeRO-Infinity (arXiv 2104.07857). They are for a transformer of Ψ =
12·L·h² parameters in 16 bits, with b sequences of s tokens on each GPU and with
recomputation:

    FLOPs per step           2 forward + 2 recomputation + 4 backward = 8 · b · s · Ψ
    parameters, gradients    2Ψ bytes, loaded three times, and 2Ψ bytes stored: 4 · 2Ψ
    optimizer states         16Ψ bytes, read and written: 2 · 16Ψ
    activation checkpoints   2 · b · s · h bytes per layer, stored and loaded: 4 · b · s · h · L

One process, no GPU. Draws infinity.svg.
"""

import sys

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

PEAK = 70e12  # FLOP/s that a V100 reaches, according to the paper
H200 = 400e12  # 40% of the dense bf16 peak of an H200
S, H, LAYERS, GPUS = 1024, 8192, 128, 64
DGX2 = {"GPU": 16 * 32e9, "CPU": 1.5e12, "NVMe": 28e12}  # bytes in one DGX-2


def flops(b: float, s: int, psi: float) -> float:
    """FLOPs of one step on one GPU: forward 2, backward 4, recomputation 2 per parameter."""
    return 8 * b * s * psi


# --8<-- [start:intensity]
def bytes_moved(b: float, s: int, h: int, layers: int) -> dict[str, float]:
    """Return the bytes that one step moves for each kind of data that can be offloaded."""
    psi = 12 * layers * h * h
    return {
        "parameters, gradients": 4 * 2 * psi,  # 3 loads and 1 store, 2 bytes each
        "optimizer states": 2 * 16 * psi,  # read and written, 16 bytes each
        "activation checkpoints": 2 * 2 * b * s * h * layers,  # stored and loaded, 2 bytes
    }


def intensities(b: float, s: int, h: int, layers: int) -> dict[str, float]:
    """FLOPs per byte moved, for each kind of data that may be offloaded."""
    work = flops(b, s, 12 * layers * h * h)
    return {kind: work / size for kind, size in bytes_moved(b, s, h, layers).items()}


def bandwidth(intensity: float, efficiency: float, peak: float) -> float:
    """Return the bytes per second that one GPU needs to reach this efficiency."""
    return efficiency / (1 - efficiency) * peak / intensity


# --8<-- [end:intensity]


def draw(intensity: dict[str, float], path: str) -> None:
    """Draw efficiency against bandwidth for each kind of data that may be offloaded."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "infinity", "font.size": 11})
    figure, axis = plt.subplots(figsize=(7, 3.8))
    rates = [10 ** (k / 20) for k in range(-20, 81)]  # GB/s
    colours = dict(zip(intensity, ("#0b6e99", "#c2410c", "#15803d"), strict=True))
    places = ((25, 66, "right"), (420, 55, "left"), (0.46, 50, "left"))  # of the labels
    spots = dict(zip(intensity, places, strict=True))
    for kind, value in intensity.items():
        percents = [100 * value * w * 1e9 / (value * w * 1e9 + PEAK) for w in rates]
        axis.plot(rates, percents, color=colours[kind], linewidth=2)
        x, y, side = spots[kind]
        axis.text(x, y, kind.replace(" ", "\n"), color=colours[kind], ha=side, va="center")
        gaps = {
            k: abs(100 * v * x * 1e9 / (v * x * 1e9 + PEAK) - y) for k, v in intensity.items()
        }
        assert min(gaps, key=gaps.get) == kind  # the label is nearest to its own curve
    for rate, name, x, side in (
        (3, "one link", 2.7, "right"),
        (3 * GPUS, f"{GPUS} links", 210, "left"),
    ):
        axis.axvline(rate, color="#52525b", linestyle=":", linewidth=1.2)
        axis.text(x, 8, f"{name},\n{rate} GB/s", color="#52525b", ha=side, va="bottom")
    axis.set_xscale("log")
    axis.set_ylim(0, 104)
    axis.set_xlim(rates[0], rates[-1])
    axis.set_xlabel("bandwidth for the bytes of one GPU, GB/s")
    axis.set_ylabel("efficiency, %")
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, transparent=True, metadata={"Date": None})


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit("start this with: python infinity.py")
    small, large = (intensities(b, S, H, LAYERS) for b in (1, 2))
    closed = (2 * S, 2 * S / 4, 24 * H)  # the paper's forms: b·s, b·s/4, 24·h
    compute = flops(2, S, 12 * LAYERS * H * H) / PEAK  # seconds of one step
    moved = bytes_moved(2, S, H, LAYERS)
    print(f"s = {S}, h = {H}, GPUs that reach {PEAK / 1e12:.0f} TFLOP/s; b = 2, but 1 for 50%")
    print(f"{'':24}                required GB/s for an efficiency of")
    print(f"{'':24}FLOPs/byte   50% at b = 1       90%   90%, each of {GPUS} links")
    for (kind, value), form in zip(large.items(), closed, strict=True):
        assert value == form
        half = bandwidth(small[kind], 0.5, PEAK) / 1e9
        most = bandwidth(value, 0.9, PEAK) / 1e9
        transfer = moved[kind] / (most * 1e9)
        assert abs(compute / (compute + transfer) - 0.9) < 1e-12
        link = most if "activation" in kind else most / GPUS  # each GPU has its own activations
        print(f"{kind:24}{value:10.0f} {half:14.1f} {most:9.1f} {link:22.1f}")

    draw(large, "infinity.svg")
    print("tokens per GPU for 90%, if parameters and gradients are offloaded")
    machines = (  # each GPU receives all parameters over NVLink; the network must be no slower
        ("16 V100, PCIe, 3 GB/s each", 16 * 3e9, 150e9, PEAK),
        ("8 H200, PCIe 5, 50 GB/s each", 8 * 50e9, 450e9, H200),
        ("64 H200, PCIe 5, 50 GB/s each", 64 * 50e9, 450e9, H200),
    )
    for name, links, nvlink, peak in machines:
        rate = min(links, nvlink)
        limit = f"{'all links' if links < nvlink else 'NVLink'}: {rate / 1e9:.0f} GB/s"
        print(f"  {name:30} {bandwidth(1, 0.9, peak) / rate:8,.0f}   {limit}")

    print("parameters that fit into one DGX-2 (16 V100, 1.5 TB, 28 TB NVMe), in billions")
    host, gpus = DGX2["CPU"] / 12, DGX2["GPU"] / 4
    assert host < gpus < 1.05 * host  # both memories are full at nearly the same size
    places = {
        "all on the GPUs (ZeRO-3)": DGX2["GPU"] / 16,
        "optimizer on the CPU, 4Ψ bytes on GPUs": min(host, gpus),
        "all on the CPU": DGX2["CPU"] / 16,
        "all on NVMe (ZeRO-Infinity)": DGX2["NVMe"] / 16,
    }
    for where, psi in places.items():
        print(f"  {where:38} {psi / 1e9:6.0f}")


if __name__ == "__main__":
    main()
