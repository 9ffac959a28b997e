"""How many 32-byte sectors one warp's load touches: strides, misaligned starts, struct fields.

A warp asks for 32 addresses at once, and memory answers in sectors of 32 bytes. Sectors touched
× 32 over bytes asked for is what the access costs. Draws coalescing.svg.
"""

import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

LANES, SECTOR = 32, 32


# --8<-- [start:sectors]
def sectors(addresses: list[int], size: int) -> int:
    """Distinct 32-byte sectors that a warp touches with `size` bytes at each address."""
    return len({(a + byte) // SECTOR for a in addresses for byte in range(size)})


def strided(stride: int, size: int = 4, start: int = 0) -> list[int]:
    """Lane i reads element i × stride of an array that starts at byte `start`."""
    return [start + lane * stride * size for lane in range(LANES)]


# --8<-- [end:sectors]


def formula(stride: int, size: int = 4) -> int:
    """Aligned start: a sector for every lane, or the span in sectors if that is less."""
    span = ((LANES - 1) * stride + 1) * size
    return min(LANES, -(-span // SECTOR))


def draw(strides: list[int], shifts: list[int]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "coalescing", "font.size": 12}
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 4.8), height_ratios=(1.5, 1))
    above.plot(strides, [sectors(strided(s), 4) for s in strides], "o-", color="#0b6e99")
    above.text(1, 27, "from stride 8 on\na sector for each lane", color="#0b6e99", fontsize=11)
    above.set(ylim=(0, 36), xticks=[1, 2, 4, 8, 12, 16], yticks=[0, 4, 8, 16, 24, 32])
    above.set_xlabel("stride (floats), aligned start", loc="left")
    below.plot(shifts, [sectors(strided(1, 4, b), 4) for b in shifts], "o-", color="#c2410c")
    below.text(2, 6, "misaligned: one more", color="#c2410c", fontsize=11)
    below.set(ylim=(0, 7.5), xticks=shifts[::8], yticks=[0, 4, 5])
    below.set_xlabel("start of the array (bytes), stride 1", loc="left")
    for axes in (above, below):
        axes.set_ylabel("sectors per warp")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("coalescing.svg", transparent=True, metadata={"Date": None})


def main() -> None:
    random.seed(0)
    anywhere = [4 * random.randrange(2**20) for _ in range(LANES)]
    rows = [
        ("x[i]", strided(1), 4),
        ("x[i + 1]", strided(1, start=4), 4),
        ("x[31 - i], reversed", strided(1)[::-1], 4),
        ("x[2 * i]", strided(2), 4),
        ("x[8 * i]", strided(8), 4),
        ("x[1024 * i], a column", strided(1024), 4),
        ("x[0], the same for all", strided(0), 4),
        ("x[random]", anywhere, 4),
        ("fp16 x[i]", strided(1, 2), 2),
        ("float4 x[i]", strided(1, 16), 16),
        ("p[i].x of three floats", strided(3), 4),
        ("p[i].x of 16 floats", strided(16), 4),
    ]
    print("what lane i reads        asked   sectors   moved   useful")
    for name, addresses, size in rows:
        asked = len(set(addresses)) * size
        count = sectors(addresses, size)
        moved = count * SECTOR
        print(f"{name:23} {asked:4} B {count:9} {moved:5} B {asked / moved:8.1%}")
    assert sectors([30], 4) == 2  # bytes 30 to 33
    strides = list(range(1, 17))
    assert all(sectors(strided(s), 4) == formula(s) for s in range(1, 65))
    print("strides 1 to 64: equal to min(32, ceil((31·stride + 1)·4 / 32))")
    shifts = list(range(0, 132, 4))
    extra = {sectors(strided(1, 4, b), 4) for b in shifts if b % SECTOR}
    assert extra == {5} and sectors(strided(1, 4, 96), 4) == 4
    print("a start that is no multiple of 32 bytes: 5 sectors in place of 4")
    draw(strides, shifts)


if __name__ == "__main__":
    main()
