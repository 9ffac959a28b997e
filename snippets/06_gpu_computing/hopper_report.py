"""What nvcc made of hopper.cu: two instructions load, four multiply, and no thread helps.

Start it with hopper.cu. It is compiled for sm_90a, which needs no GPU, and its machine code is
counted: in the whole kernel, and in the loop of the warps that multiply.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

Code = list[str]
INSTRUCTIONS = (
    (r"UTMALDG\S*", "TMA fetches a tile"),
    (r"SYNCS\.EXCH\S*", "mbarrier.init"),
    (r"SYNCS\.ARRIVE\S*", "mbarrier.arrive"),
    (r"SYNCS\.PHASECHK\S*", "mbarrier.try_wait"),
    (r"HGMMA\.64x128x16\S*", "wgmma"),
    (r"WARPGROUP\.DEPBAR\S*", "wgmma.wait_group"),
    (r"LD[GS]\S*|LDSM\S*|STS\S*", "loads and stores of tiles by threads"),
    (r"STG\.E\.64\S*", "two sums to C"),
)


def cuobjdump() -> str:
    """The disassembler: CUDA's, or the one in Triton's package."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton else None
    found = shutil.which("cuobjdump") or (beside and beside.exists() and str(beside))
    return found or sys.exit("cuobjdump is missing: pip install triton brings it")


def machine_code(cubin: Path) -> dict[str, tuple[int, int, Code, list[Code]]]:
    """Of each kernel its registers, bytes of local memory, instructions and innermost loops."""
    command = [cuobjdump(), "-sass", "-res-usage", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = dict(re.findall(r"Function (\w+):\n +(.*)", text))
    kernels = {}
    for part in text.split("Function : ")[1:]:
        name = part.split()[0]
        code = [(int(a, 16), line) for a, line in re.findall(r"/\*(\w{4,5})\*/ +(.*?) ;", part)]
        loops: list[tuple[int, int]] = []
        for at, line in code:  # a loop ends with a jump back
            jump = re.search(r"\bBRA\b.* 0x(\w+)", line)
            to = int(jump[1], 16) if jump else at
            if to < at and not any(begin > to for begin, _ in loops):
                loops.append((to, at))
        registers, local = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage[name]).groups())
        bodies = [[x for at, x in code if begin <= at <= end] for begin, end in loops]
        kernels[name] = registers, local, [x for _, x in code], bodies
    return kernels


def count(pattern: str, code: Code) -> int:
    return sum(bool(re.search(rf"\b(?:{pattern})(?![\w.])", line)) for line in code)


def blocks_per_sm(threads: int, registers: int, shared: int, capability: int) -> int:
    """Blocks that one SM holds at once: an A100's or an H100's, 8.0 or 9.0."""
    warps = threads // 32
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    per_sm = {80: 164, 90: 228}[capability] * 1024  # and 1 KiB of it is kept for each block
    by_shared = per_sm // (-(-(shared + 1024) // 128) * 128)
    return min(64 // warps, by_registers, by_shared, 32)


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
    loads, inits, arrivals, waits, products, ends, by_threads, results = counted
    assert loads == (2, 0) and by_threads == (0, 0)  # A's and B's; the loop asks for nothing
    assert inits == (2 * stages, 0) and arrivals == (2, 1) and waits[1] >= 1
    assert ends == (1, 1)  # else ptxas makes wgmma run one after the other
    assert products == (bk // 16, bk // 16) and results == (bm * bn // 2 // (32 * warps), 0)


if __name__ == "__main__":
    main()
