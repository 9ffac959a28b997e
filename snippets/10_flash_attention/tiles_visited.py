"""A causal kernel skips most tiles above the diagonal and masks only the tiles on it.

Each row of tiles has two bounds. Before `whole`, every query of the row sees every key.
From `end` on, no query sees a key. The program compares both bounds with the mask, element by
element, for 486 combinations of lengths and tiles. Draws tiles_visited.svg.
"""

import itertools


# --8<-- [start:bounds]
def bounds(first: int, s_q: int, s_k: int, bm: int, bn: int) -> tuple[int, int]:
    """Return the ends of the loops without and with a mask, for bm queries from first on."""
    shift = s_k - s_q  # the last query sees the last key
    end = min(s_k, max(0, first + bm + shift))
    whole = min(s_k, max(0, first + shift + 1)) // bn * bn
    return whole, end


# --8<-- [end:bounds]


def kinds(s_q: int, s_k: int, bm: int, bn: int) -> dict[tuple[int, int], str]:
    """Say for each tile, given by its first query and key: whole, cut or skipped."""
    found = {}
    for first in range(0, s_q, bm):
        whole, end = bounds(first, s_q, s_k, bm, bn)
        for start in range(0, s_k, bn):
            found[first, start] = (
                "whole" if start < whole else "cut" if start < end else "skipped"
            )
    return found


def check(s_q: int, s_k: int, bm: int, bn: int) -> dict[str, int]:
    """Compare the bounds with the mask, and count the tiles of each kind."""
    counts = dict.fromkeys(("whole", "cut", "skipped"), 0)
    for (first, start), kind in kinds(s_q, s_k, bm, bn).items():
        seen = [
            start + j <= first + i + s_k - s_q
            for i in range(min(bm, s_q - first))
            for j in range(bn)
        ]
        assert kind == ("whole" if all(seen) else "cut" if any(seen) else "skipped")
        counts[kind] += 1
    return counts


def draw(cases: list[tuple[int, int, int, int]]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "visited", "font.size": 12}
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), width_ratios=(1, 1.4))
    colours = {"whole": "#0b6e99", "cut": "#c2410c", "skipped": "none"}
    for axis, (s_q, s_k, bm, bn) in zip(axes, cases, strict=True):
        for (first, start), kind in kinds(s_q, s_k, bm, bn).items():
            size = min(bn, s_k - start), min(bm, s_q - first)
            axis.add_patch(plt.Rectangle((start, first), *size, facecolor=colours[kind],
                                         edgecolor="#9ca3af", linewidth=1))  # fmt: skip
        ends = [s_k - s_q, s_k], [0, s_q]
        axis.plot(*ends, color="#ffffff", linewidth=3)  # so that it shows on any colour
        axis.plot(*ends, color="#111827", linewidth=1.5, linestyle="--")
        axis.set(xlim=(0, s_k), ylim=(s_q, 0), aspect="equal", xlabel="keys")
        axis.set_xticks(range(0, s_k + 1, 2 * bn))
        axis.set_yticks(range(0, s_q + 1, bm))
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("queries")
    figure.tight_layout()
    figure.savefig("tiles_visited.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    for shape in itertools.product(range(1, 10), range(1, 10), (1, 2, 4), (2, 3)):
        check(*shape)
    print("queries  keys   tile    whole     cut skipped")
    for s_q, s_k, bm, bn in ((24, 24, 4, 4), (16, 36, 4, 4), (25, 23, 4, 6), (7, 7, 8, 2)):
        counts = check(s_q, s_k, bm, bn)
        print(f"{s_q:7} {s_k:5}   {bm} x {bn}" + "".join(f"{x:8}" for x in counts.values()))
    for s, b in ((8192, 128), (131072, 128)):
        ends = [bounds(first, s, s, b, b) for first in range(0, s, b)]
        computed = sum(end // b for _, end in ends)
        masked = sum((end - whole) // b for whole, end in ends)
        t = s // b
        assert (masked, computed) == (t, t * (t + 1) // 2)  # 2 of t + 1 are masked
        print(f"{s:7} {s:6} {b} x {b}: {masked} of {computed:,} computed tiles are masked")
    draw([(24, 24, 4, 4), (16, 36, 4, 4)])


if __name__ == "__main__":
    main()
