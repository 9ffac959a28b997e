"""A load of a warp costs the 32-byte sectors that its lanes touch, and not the bytes they need.

The 32 lanes of a warp have 32 addresses. Memory answers in whole sectors of 32 bytes, and a
sector that several lanes touch is delivered once. Look at the column `useful`: it is the
fraction of the delivered bytes that the lanes need. The program draws coalescing.svg.
"""

import random

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

LANES, SECTOR = 32, 32


# --8<-- [start:sectors]
def sectors(addresses: list[int], size: int) -> int:
    """Return how many sectors are touched by lanes that read `size` bytes at each address."""
    return len({(a + byte) // SECTOR for a in addresses for byte in range(size)})


def strided(stride: int, size: int = 4, start: int = 0) -> list[int]:
    """Return the addresses of the lanes: lane i reads element i × stride, from byte `start`."""
    return [start + lane * stride * size for lane in range(LANES)]


# --8<-- [end:sectors]


def formula(stride: int, size: int = 4) -> int:
    """For an aligned start: the span in sectors, but at most one sector for each lane."""
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
    (drawn,), (shifted,) = above.lines, below.lines
    assert [*drawn.get_ydata()] == [formula(s) for s in strides]
    assert [*shifted.get_ydata()] == [5 if start % 32 else 4 for start in shifts]
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
        if "x[" in name and "random" not in name:  # the index is the one in the brackets
            index = name[name.index("[") + 1 : name.index("]")]
            assert addresses == [size * eval(index, {"i": lane}) for lane in range(LANES)]
    floats = [[a // 4 for a in addresses[:3]] for _, addresses, _ in rows[-2:]]
    assert floats == [[0, 3, 6], [0, 16, 32]]  # structs of 3 and of 16 floats
    assert sectors([30], 4) == 2  # bytes 30 to 33
    strides = list(range(1, 17))
    assert all(sectors(strided(s), 4) == formula(s) for s in range(1, 65))
    print("strides 1 to 64: equal to min(32, ceil((31·stride + 1)·4 / 32))")
    shifts = list(range(0, 132, 4))
    for start in shifts:
        assert sectors(strided(1, 4, start), 4) == (5 if start % 32 else 4)
    print("a start that is no multiple of 32 bytes: 5 sectors in place of 4")
    block = [each for warp in range(32) for each in strided(1, start=4 + 128 * warp)]
    requests = sum(sectors(block[32 * warp : 32 * warp + 32], 4) for warp in range(32))
    distinct = sectors(block, 4)  # a warp and the next one share a sector
    assert requests == 32 * 5 and distinct == 32 * 4 + 1
    print(f"32 neighbouring warps, x[i + 1]: {requests} requests for {distinct} sectors")
    draw(strides, shifts)


if __name__ == "__main__":
    main()
