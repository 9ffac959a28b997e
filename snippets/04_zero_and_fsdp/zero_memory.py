"""The memory table of the ZeRO paper, recomputed from three formulas, and a figure.

Adam in mixed precision keeps 2 bytes of parameter, 2 bytes of gradient and K = 12 bytes of
optimizer state (a master weight and two moments) for each of Ψ parameters. Each stage of ZeRO
divides one more of these three among N ranks.

The program prints every cell of Table 1 of Rajbhandari et al. (2020, arXiv 1910.02054) next to
the value of the formula. The last line counts the cells that the paper rounded and the cells
whose last digits it cut off. The program also draws zero_memory.svg.
"""

import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

K = 12
MODELS = {"7.5B": 7.5, "128B": 128.0, "1T": 1000.0}  # Ψ in 10⁹, so that bytes come out in GB
RANKS = (1, 4, 16, 64, 256, 1024)
PUBLISHED = {  # GB for 7.5B, 128B and 1T, each of them for stages 1, 2 and 3
    1: "120 120 120  2048 2048 2048  16000 16000 16000",
    4: "52.5 41.3 30  896 704 512  7000 5500 4000",
    16: "35.6 21.6 7.5  608 368 128  4750 2875 1000",
    64: "31.4 16.6 1.88  536 284 32  4187 2218 250",
    256: "30.4 15.4 0.47  518 263 8  4046 2054 62.5",
    1024: "30.1 15.1 0.12  513 257 2  4011 2013 15.6",
}


def per_rank(parameters: float, n: int, stage: int) -> float:
    """Return the bytes of model state on each of `n` ranks."""
    # parameters are divided from stage 3 on, gradients from stage 2, the optimizer from stage 1
    divisors = [n if stage >= first else 1 for first in (3, 2, 1)]
    return sum(size * parameters / by for size, by in zip((2, 2, K), divisors, strict=True))


def how_printed(exact: float, printed: str) -> str:
    """Return "rounded" or "cut off": how the paper shortened the exact value.

    A half is rounded up, so 41.25 becomes 41.3. The value 513.5 that is printed as 513 is cut
    off. If both give the printed value, the answer is "rounded".
    """
    value, digit = Decimal(exact), Decimal(printed)  # a binary fraction is exact as a Decimal
    if value.quantize(digit, ROUND_HALF_UP) == digit:
        return "rounded"
    if value.quantize(digit, ROUND_DOWN) == digit:
        return "cut off"
    raise AssertionError(f"the formula gives {exact}, the paper prints {printed}")


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "zero_memory", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    ranks = [2**k for k in range(11)]
    rows = [  # stage, colour, label, position of the label
        (0, "#52525b", "DDP: 16Ψ", (40, 140)),
        (1, "#c2410c", "ZeRO-1: 4Ψ + 12Ψ/N", (40, 39)),
        (2, "#7c3aed", "ZeRO-2: 2Ψ + 14Ψ/N", (40, 9.5)),
        (3, "#0b6e99", "ZeRO-3: 16Ψ/N", (2.6, 3)),
    ]
    for stage, colour, words, at in rows:
        axes.plot(
            ranks, [per_rank(7.5, n, stage) for n in ranks], "o-", color=colour, markersize=4
        )
        axes.text(*at, words, color=colour)
        gaps = [abs(math.log(per_rank(7.5, at[0], each) / at[1])) for each in range(4)]
        assert gaps[stage] == min(gaps)  # the label is nearest to its own curve
    for n, published in PUBLISHED.items():  # the curves go through the values of the paper
        curves = [line.get_ydata()[ranks.index(n)] for line in axes.lines]
        for value, cell in zip(curves, ["120", *published.split()[:3]], strict=True):
            assert how_printed(value, cell)
    axes.axhline(80, color="#15803d", linestyle="--", linewidth=1.2)
    axes.text(1100, 72, "80 GB", color="#15803d", ha="right", va="top")
    axes.set(xscale="log", yscale="log", xlabel="ranks N", ylabel="model state per rank (GB)")
    axes.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_ylim(0.08, 260)
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("zero_memory.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print("GB per GPU, computed / published")
    print(f"{'':6}{'':8}{'ZeRO-1':>17}{'ZeRO-2':>17}{'ZeRO-3':>17}")
    printed = []
    for column, (name, billions) in enumerate(MODELS.items()):
        for n in RANKS:
            published = PUBLISHED[n].split()[3 * column : 3 * column + 3]
            cells = []
            for stage, figure in enumerate(published, start=1):
                ours = per_rank(billions, n, stage)
                printed.append(how_printed(ours, figure))
                cells.append(f"{ours:.2f} / {figure}")
            print(f"{name:6}N={n:<6}" + "".join(f"{cell:>17}" for cell in cells))
    rounded, cut_off = printed.count("rounded"), printed.count("cut off")
    print(f"{rounded} of {len(printed)} cells are the formula rounded, {cut_off} are cut off")
    draw()


if __name__ == "__main__":
    main()
