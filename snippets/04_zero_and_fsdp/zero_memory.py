"""ZeRO's memory per GPU: three formulas, the paper's whole table recomputed, and a figure.

Mixed-precision Adam keeps 2 bytes of parameter, 2 of gradient and K = 12 of optimizer state
(master weight and two moments) for each of Ψ parameters. A stage divides one more of them by N.
The table is Table 1 of Rajbhandari et al. (2020, arXiv 1910.02054). Draws zero_memory.svg.
"""

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

K = 12
MODELS = {"7.5B": 7.5, "128B": 128.0, "1T": 1000.0}  # Ψ in 10⁹, so that bytes come out in GB
RANKS = (1, 4, 16, 64, 256, 1024)
PUBLISHED = {  # GB for 7.5B, 128B, 1T; each of them at stages 1, 2 and 3
    1: "120 120 120  2048 2048 2048  16000 16000 16000",
    4: "52.5 41.3 30  896 704 512  7000 5500 4000",
    16: "35.6 21.6 7.5  608 368 128  4750 2875 1000",
    64: "31.4 16.6 1.88  536 284 32  4187 2218 250",
    256: "30.4 15.4 0.47  518 263 8  4046 2054 62.5",
    1024: "30.1 15.1 0.12  513 257 2  4011 2013 15.6",
}


def per_rank(parameters: float, n: int, stage: int) -> float:
    """Bytes of model state on each of `n` ranks."""
    shared = [n if stage >= level else 1 for level in (3, 2, 1)]
    return sum(size * parameters / by for size, by in zip((2, 2, K), shared, strict=True))


def step_of(figure: str) -> float:
    """What one unit of the last printed digit is worth: 0.1 for 41.3, 1 for 4187."""
    return 10 ** -len(figure.partition(".")[2])


def draw() -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "zero_memory", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    ranks = [2**k for k in range(11)]
    rows = [  # stage, colour, words, where they stand
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
    assert [step_of(figure) for figure in ("4187", "41.3", "1.88")] == [1, 0.1, 0.01]
    exact = within = 0
    for column, (name, billions) in enumerate(MODELS.items()):
        for n in RANKS:
            published = PUBLISHED[n].split()[3 * column : 3 * column + 3]
            cells = []
            for stage, figure in enumerate(published, start=1):
                ours = per_rank(billions, n, stage)
                off = abs(ours - float(figure)) / step_of(figure)
                assert off < 1, (name, n, stage, ours, figure)  # rounded or cut off
                exact += off <= 0.5 + 1e-9
                within += 1
                cells.append(f"{ours:.2f} / {figure}")
            print(f"{name:6}N={n:<6}" + "".join(f"{cell:>17}" for cell in cells))
    print(f"{exact} of {within} cells are the formula rounded, {within - exact} are cut off")
    draw()


if __name__ == "__main__":
    main()
