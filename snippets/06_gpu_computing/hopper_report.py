"""The machine code of hopper.cu contains no load or store of a factor by a thread.

    python hopper_report.py hopper.cu

The program compiles hopper.cu for sm_90a, which needs no GPU. It counts instructions in the
whole kernel and in the loop of the warps that multiply. Two instructions of TMA load the tiles
of a stage, and four `wgmma` multiply them.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_report import blocks_per_sm
from machine_code import count, machine_code

INSTRUCTIONS = (
    (r"UTMALDG\S*", "TMA fetches a tile"),
    (r"SYNCS\.EXCH\S*", "mbarrier.init"),
    (r"SYNCS\.ARRIVE\S*", "mbarrier.arrive"),
    (r"SYNCS\.PHASECHK\S*", "mbarrier.try_wait"),
    (r"HGMMA\.64x128x16\S*", "wgmma"),
    (r"WARPGROUP\.DEPBAR\S*", "wgmma.wait_group"),
    (r"LD(?!C)\S*|STS\S*", "loads and stores of tiles by threads"),  # LDC loads a parameter
    (r"STG\.E\.64\S*", "two sums to C"),
)


def main() -> None:
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("start it as: python hopper_report.py hopper.cu")
    if not shutil.which("nvcc"):
        sys.exit("hopper_report.py needs nvcc, of the CUDA toolkit (but no GPU)")
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "hopper.cubin"
        command = ["nvcc", "-O3", "-std=c++17", "-gencode", "arch=compute_90a,code=sm_90a"]
        strict = ["--Werror", "all-warnings", "-cubin", "-o", cubin]
        subprocess.run([*command, *strict, sys.argv[1]], check=True)
        kernels = machine_code(cubin)
    ((registers, local, code, loops),) = (k for name, k in kernels.items() if "product" in name)
    (loop,) = (x for x in loops if count(r"HGMMA\S*", x))

    source = Path(sys.argv[1]).read_text("utf-8")
    bm, bn, bk, stages, warps = (
        int(re.search(rf"\b{name} = (\d+)", source)[1])
        for name in ("BM", "BN", "BK", "STAGES", "CONSUMERS")
    )
    shared = stages * (bm + bn) * bk * 2 + 2048  # two bytes a factor; barriers and alignment
    blocks = blocks_per_sm(32 * (warps + 1), registers, shared, 90)
    assert local == 0 and blocks == 2
    print(
        f"product: ≈{registers} registers, {local} bytes spilled, {shared} bytes shared,",
        end=" ",
    )
    print(f"{blocks} blocks on an SM")
    print("                                      kernel  loop with wgmma")
    for pattern, what in INSTRUCTIONS:
        print(f"{what:38} {count(pattern, code):4} {count(pattern, loop):7}")

    counted = [(count(pattern, code), count(pattern, loop)) for pattern, _ in INSTRUCTIONS]
    # zero instructions prove something only if the pattern finds such instructions elsewhere
    (other,) = (k[2] for name, k in kernels.items() if "errors" in name)
    names = "LDG.E.128", "LD.E", "LDS.128", "LDSM.16.M88.4", "STS.128", "LDGSTS.E.BYPASS.128"
    found = [count(INSTRUCTIONS[6][0], [f"{name} R4, R2"]) for name in names]
    assert count(INSTRUCTIONS[6][0], other) > 0 and found == [1] * len(names)
    loads, inits, arrivals, waits, products, ends, by_threads, results = counted
    assert loads == (2, 0) and by_threads == (0, 0)  # A's and B's; the loop asks for nothing
    assert inits == (2 * stages, 0) and arrivals == (2, 1) and waits[1] >= 1
    assert ends == (1, 1)  # else ptxas makes wgmma run one after the other
    assert products == (bk // 16, bk // 16) and results == (bm * bn // 2 // (32 * warps), 0)


if __name__ == "__main__":
    main()
