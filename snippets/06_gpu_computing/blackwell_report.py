"""On Blackwell one thread starts the products, and their sums need no registers.

    python blackwell_report.py hopper.cu blackwell.cu

The program compiles hopper.cu for sm_90a and blackwell.cu for sm_100a, which needs no GPU, and
counts instructions of both kernels `product`. Look at the registers: in hopper.cu each thread
of the consumers has 64 sums. In blackwell.cu a thread has sums only after it has taken 32 of
them out of tensor memory.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine_code import count, machine_code

ARCHITECTURES = {"hopper.cu": "90a", "blackwell.cu": "100a"}
INSTRUCTIONS = (  # what it does, its name on Hopper, its name on Blackwell
    ("TMA fetches a tile for this block", r"UTMALDG\.2D", r"UTMALDG\.2D"),
    ("TMA fetches a tile for both blocks", None, r"UTMALDG\.2D\.MULTICAST"),
    ("mbarrier.init", r"SYNCS\.EXCH\S*", r"SYNCS\.EXCH\S*"),
    ("mbarrier.arrive", r"SYNCS\.ARRIVE\S*", r"SYNCS\.ARRIVE\S*"),
    ("a product: wgmma, tcgen05.mma", r"HGMMA\.64x128x16\S*", "UTCHMMA"),
    ("its end: wait_group, commit", r"WARPGROUP\.DEPBAR\S*", r"UTCBAR\S*"),
    ("tcgen05.ld: 32 sums to a thread", None, r"LDTM\.x32"),
    # on Blackwell without LDS and STS, through which tcgen05.alloc returns an address
    ("loads of factors by threads", r"LD[GS]\S*|LDSM\S*|STS\S*", r"LDG\S*|LDSM\S*"),
    ("stores of sums to C", r"STG\.E\.64\S*", r"STG\.E\.128\S*"),
)


def compiled(name: str, unrolled: bool = False) -> tuple[int, int, list[str]]:
    """Return registers, bytes of local memory and instructions of the kernel `product`.

    With `unrolled`, nvcc may unroll the loop over the columns of a tile.
    """
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        number = ARCHITECTURES[Path(name).name]
        target = f"arch=compute_{number},code=sm_{number}"
        command = ["nvcc", "-O3", "-std=c++17", "-gencode", target, "--Werror", "all-warnings"]
        text = Path(name).read_text("utf-8")
        if unrolled:
            assert text.count("#pragma unroll 1 ") == 1
            text = text.replace("#pragma unroll 1 ", "")
        source = Path(folder) / "kernel.cu"
        source.write_text(text, "utf-8")
        subprocess.run([*command, "-cubin", "-o", cubin, source], check=True)
        kernels = machine_code(cubin)
    ((registers, local, code, _),) = (k for name, k in kernels.items() if "product" in name)
    return registers, local, code


def kernel_sizes(source: str) -> dict[str, int]:
    """Return the sizes of the kernel, such as BM, from the lines with constexpr int."""
    section = source[source.index("[start:constants]") : source.index("[end:constants]")]
    return {name: int(value) for name, value in re.findall(r"\b([A-Z]+) = (\d+)\b", section)}


def main() -> None:
    names = sys.argv[1:]
    if [Path(name).name for name in names] != list(ARCHITECTURES):
        sys.exit("start it as: python blackwell_report.py " + " ".join(ARCHITECTURES))
    for name in names:
        if not Path(name).is_file():
            sys.exit(f"blackwell_report.py: there is no file {name} here; copy it")
    if not shutil.which("nvcc"):
        sys.exit("blackwell_report.py needs nvcc, of the CUDA toolkit (but no GPU)")
    hopper, blackwell = (kernel_sizes(Path(name).read_text("utf-8")) for name in names)
    kernels = [compiled(name) for name in names]
    (hopper_registers, hopper_local, _), (registers, local, code) = kernels

    print("                                       hopper.cu   blackwell.cu")
    rows = (
        ("a block's tile of C", *(f"{s['BM']} × {s['BN']}" for s in (hopper, blackwell))),
        ("threads in a block", 32 * (hopper["CONSUMERS"] + 1), 32 * (blackwell["STORERS"] + 2)),
        ("registers of a thread", f"≈{hopper_registers}", f"≈{registers}"),
        ("bytes spilled", hopper_local, local),
    )
    counted = {}
    for what, on_hopper, on_blackwell in INSTRUCTIONS:
        patterns = on_hopper, on_blackwell
        both = [p and count(p, k[2]) for p, k in zip(patterns, kernels, strict=True)]
        counted[what] = both
        rows += ((what, *("–" if number is None else number for number in both)),)
    for what, *columns in rows:
        print(f"{what:37} {columns[0]!s:>10} {columns[1]!s:>14}")

    new = [both[1] for both in counted.values()]
    own, both, inits, arrivals, products, ends, takes, by_threads, stores = new
    assert hopper_local == local == 0
    assert (own, both) == (1, 1)  # A for this block; half of B for both
    assert inits == 2 * blackwell["STAGES"] + 2 * 2  # full, empty; two tiles of sums
    assert arrivals == 2  # the producer, and a lane of each storing warp: the rest is commit
    assert products == blackwell["BK"] // 16 == counted["a product: wgmma, tcgen05.mma"][0]
    assert count(r"UTCBAR\.MULTICAST", code) == 1 and ends == 2  # a stage; a tile of sums
    assert takes == 1 and stores == 32 // 4  # in a loop over the columns of the tile
    assert registers < hopper_registers  # although the tile is twice as large
    assert by_threads == 0

    more, _, other_code = compiled(names[1], unrolled=True)
    assert more > registers and count(r"LDTM\.x32", other_code) == blackwell["BN"] // 32
    print(f"\nIf nvcc unrolls the loop of the storing warps, a thread needs ≈{more} registers.")

    print("\nIf the sums of a tile were in the registers of 256 threads, each would have")
    for name, size in (("hopper.cu", hopper), ("blackwell.cu", blackwell)):
        print(f"  {name:26} {size['BM'] * size['BN'] // 256:4} of at most 255 registers")
    two = 2 * blackwell["BM"] * blackwell["BN"] // 256
    assert two > 255  # with registers, a second tile of this size would not be possible
    print(f"  {'two tiles of blackwell.cu':26} {two:4} of at most 255 registers")
    source = Path(names[1]).read_text("utf-8")
    columns = int(re.search(r"COLUMNS = (\d) \* BN", source)[1]) * blackwell["BN"]
    assert columns * 128 * 4 == 256 * 1024  # all of tensor memory
    print(
        f"In tensor memory, two tiles have {columns} columns of 128 lanes, which are 256 KiB."
    )


if __name__ == "__main__":
    main()
