"""How much of a GPU's work on a matrix product is useful: tiles, waves and a vocabulary.

The result D [M, N] = A [M, K] B [K, N] is cut into tiles, and each thread block computes one. A
tile at the edge is computed completely, and in the last wave of tiles some SMs have nothing to
do. This is arithmetic for one tile size and one tile per SM. Libraries choose among many tile
sizes, and they can split K. Compare N = 4,096 and N = 4,097. Draws tiles.svg.
"""

import math

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

TILE_M, TILE_N = 128, 256
SMS = {"V100": 80, "A100": 108, "H100 SXM": 132}
BYTES = {"fp32 (tf32)": 4, "fp16, bf16": 2, "fp8": 1}


def tile_share(m: int, n: int) -> float:
    """The fraction of the computed elements that belong to D."""
    tiles = math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
    return m * n / (tiles * TILE_M * TILE_N)


def wave_share(m: int, n: int, sms: int) -> float:
    """The fraction of SM time in which a tile is computed: tiles / (waves × SMs)."""
    tiles = math.ceil(m / TILE_M) * math.ceil(n / TILE_N)
    return tiles / (math.ceil(tiles / sms) * sms)


def by_counting(m: int, n: int, sms: int) -> tuple[float, float]:
    """Both fractions from a loop that gives one tile after the other to the next free SM."""
    computed, tiles = 0, [0] * sms  # tiles of each SM; every tile takes the same time
    for top in range(0, m, TILE_M):
        for left in range(0, n, TILE_N):
            computed += len(range(top, top + TILE_M)) * len(range(left, left + TILE_N))
            tiles[tiles.index(min(tiles))] += 1
    return m * n / computed, sum(tiles) / (max(tiles) * sms)


def pad(size: int, multiple: int) -> int:
    """The smallest multiple that is not smaller than size."""
    return math.ceil(size / multiple) * multiple


def draw(m: int, sms: int) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "tiles", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 3.6))
    sizes = range(256, 8193, 32)
    shares = [100 * tile_share(m, n) * wave_share(m, n, sms) for n in sizes]
    axes.plot(sizes, shares, color="#0b6e99", linewidth=1.4)
    axes.set(xlabel="columns N of D, with M = 2,048", ylabel="useful work on 132 SMs (%)")
    axes.set_ylim(0, 103)
    for n, height, words in ((4096 + 256, 38, "one more column of tiles:\na third wave"),):
        axes.annotate(
            words, (n, 100 * tile_share(m, n) * wave_share(m, n, sms)), (n + 300, height),
            color="#c2410c", arrowprops={"arrowstyle": "-", "color": "#c2410c"},
        )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("tiles.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    print(f"tiles of {TILE_M} × {TILE_N}; the fraction of the work that is useful")
    print("    M      N   in tiles" + "".join(f"{'in waves on ' + g:>22}" for g in SMS))
    for m, n in ((2048, 4096), (2048, 4097), (2048, 4352), (2048, 8192), (100, 4096)):
        waves = "".join(f"{wave_share(m, n, sms):22.0%}" for sms in SMS.values())
        print(f"{m:5}  {n:5}  {tile_share(m, n):9.0%}{waves}")
        for sms in SMS.values():
            assert by_counting(m, n, sms) == (tile_share(m, n), wave_share(m, n, sms))
    assert all(wave_share(TILE_M * sms, TILE_N, sms) == 1 for sms in SMS.values())
    assert wave_share(2048, 4097, 132) < 0.75 < 0.95 < wave_share(2048, 4096, 132)
    print("alignment: 16 bytes are")
    for name, size in BYTES.items():
        print(f"  {name:12} {16 // size:2} elements")
    v = 50257
    print(f"a vocabulary of {v:,}: {v} mod 8 = {v % 8}, so rows in bf16 are not aligned")
    for multiple in (8, 64, 128, 256):
        padded = pad(v, multiple)
        for size in (v, padded):  # a multiple stays as it is
            assert pad(size, multiple) == next(
                n for n in range(size, 2 * v) if n % multiple == 0
            )
        assert math.ceil(padded / TILE_N) == math.ceil(v / TILE_N)  # the same number of tiles
        print(f"  to a multiple of {multiple:3}: {padded:,}, {padded / v - 1:.2%} more columns")
    print(f"  all of them need {math.ceil(v / TILE_N)} tiles per row of tiles")
    draw(2048, SMS["H100 SXM"])


if __name__ == "__main__":
    main()
