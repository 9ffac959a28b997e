"""What the compiler made of a kernel: bytes per multiply-add, registers, spills and occupancy.

    python kernel_report.py sgemm.cu

The program compiles for compute capability 9.0, which needs no GPU. In the PTX it finds the
loop with the most multiply-adds and counts the bytes that the loads of this loop move. The
columns `by hand` contain the numbers that the chapter derives, and the program compares both.
`cuobjdump` shows the machine code, in which the program counts loads of 4 and of 16 bytes.
(Triton's package contains a copy of `cuobjdump`.) `ptxas -v` prints registers and shared
memory, from which the program computes how many blocks fit on an SM.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

THREADS = {"naive": 1024, "coalesced": 1024, "shared": 1024, "tile_1d": 512}  # others: 256
BY_HAND = {  # bytes per multiply-add from global memory, from shared memory
    "naive": (8, 0),  # a and b
    "coalesced": (8, 0),
    "shared": (8 / 32, 8),  # one of each tile's elements per thread, for 32 multiply-adds
    "tile_1d": (4 * (64 + 64) / (64 * 64), 4 * (8 + 1) / 8),
    "tile_2d": (4 * (128 + 128) / (128 * 128), 4 * (8 + 8) / (8 * 8)),
    "vectorised": (4 * (128 + 128) / (128 * 128), 4 * (8 + 8) / (8 * 8)),
    "warp_tile": (4 * (128 + 128) / (128 * 128), 4 * (8 + 8) / (8 * 8)),
    "double_buffered": (4 * (128 + 128) / (128 * 128), 4 * (8 + 8) / (8 * 8)),
}
SPILLED = r".*?(\d+) bytes spill stores"  # of a kernel, in the report of ptxas
MACHINE_CODE = "FFMA", r"LDG\.E", r"LDG\.E\.128", "LDS", r"LDS\.128"


def cuobjdump() -> str:
    """The disassembler: CUDA's, or the one in Triton's package."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton else None
    found = shutil.which("cuobjdump") or (beside and beside.exists() and str(beside))
    return found or sys.exit("cuobjdump is missing: pip install triton brings it")


def compile_cuda(source: Path) -> tuple[str, str, str]:
    """PTX of `source`, its machine code in words, and what ptxas reports."""
    with tempfile.TemporaryDirectory() as folder:
        command = "nvcc -O3 -std=c++17 -arch=sm_90 -Xptxas -v --keep -cubin -o kernel.cubin"
        report = subprocess.run(
            [*command.split(), source.resolve()], cwd=folder, text=True, capture_output=True
        )
        if report.returncode:
            raise SystemExit(f"nvcc: {report.stderr.strip()}")
        code = subprocess.check_output(
            [cuobjdump(), "-sass", "kernel.cubin"], cwd=folder, text=True
        )
        return next(Path(folder).glob("*.ptx")).read_text(), code, report.stderr


def main_loop(body: str) -> list[str]:
    """The instructions of the loop with the most fma: from a label to the jump back to it."""
    lines, best = [line.strip() for line in body.splitlines()], []
    labels = {line[:-1]: at for at, line in enumerate(lines) if re.fullmatch(r"\$L\w+:", line)}
    for at, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        if jump and labels[jump[1]] < at:
            loop = lines[labels[jump[1]] : at]
            if sum("fma.rn.f32" in x for x in loop) > sum("fma.rn.f32" in x for x in best):
                best = loop
    return best


def loads(loop: list[str], space: str) -> tuple[int, int]:
    """Load instructions from `space` in `loop`, and the bytes that a thread gets from them."""
    found = re.findall(rf"\bld\.{space}(?:\.nc)?(?:\.v(\d))?\.[a-z]?(\d+)\b", "\n".join(loop))
    return len(found), sum(int(vector or 1) * int(bits) // 8 for vector, bits in found)


def blocks_per_sm(threads: int, registers: int, shared: int, capability: int) -> int:
    """Blocks that one SM holds at once: an A100's or an H100's, 8.0 or 9.0."""
    warps = threads // 32
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    per_sm = {80: 164, 90: 228}[capability] * 1024  # and 1 KiB of it is kept for each block
    by_shared = per_sm // (-(-(shared + 1024) // 128) * 128)
    return min(64 // warps, by_registers, by_shared, 32)


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit("kernel_report.py takes the name of a .cu file: sgemm.cu")
    if not Path(sys.argv[1]).is_file():
        raise SystemExit(f"kernel_report.py: there is no file {sys.argv[1]} here; copy it")
    if not shutil.which("nvcc"):
        raise SystemExit("kernel_report.py needs nvcc, of the CUDA toolkit (but no GPU)")
    # an SM has four partitions of 16,384 registers, and a thread with 33 registers occupies 40
    assert blocks_per_sm(64, 33, 0, 90) == 4 * (16384 // (40 * 32)) // 2
    assert [blocks_per_sm(256, 32, 112 * 1024, gpu) for gpu in (80, 90)] == [1, 2]
    # no rung spills a register, so the pattern is tested with a line of a kernel that does
    line = "    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads"
    assert re.match(SPILLED, line)[1] == "36"
    ptx, code, report = compile_cuda(Path(sys.argv[1]))
    print("                loads per 64 FMA    bytes per FMA: counted (by hand)")
    print("rung             global   shared          global            shared")
    resources = []
    for name, threads in ((name, THREADS.get(name, 256)) for name in BY_HAND):
        symbol = f"_Z{len(name)}{name}"
        body = re.search(rf"\.entry {symbol}\w*\(.*?\n\}}", ptx, re.S)[0]
        loop = main_loop(body)
        fma = sum("fma.rn.f32" in line for line in loop)
        (global_n, global_bytes), (shared_n, shared_bytes) = (
            loads(loop, space) for space in ("global", "shared")
        )
        counted = global_bytes / fma, shared_bytes / fma
        assert counted == BY_HAND[name], (name, counted, BY_HAND[name])
        print(
            f"{name:15} {64 * global_n / fma:7.2f} {64 * shared_n / fma:8.2f}"
            + "".join(
                f"{c:11.4f} ({p:.4f})" for c, p in zip(counted, BY_HAND[name], strict=True)
            )
        )
        usage = re.search(rf"'{symbol}\w*' for.*?Used (\d+) registers([^\n]*)", report, re.S)
        spilled = re.search(rf"{symbol}\w*\n{SPILLED}", report)[1]
        shared = re.search(r"(\d+) bytes smem", usage[2])
        resources.append(
            (name, threads, int(usage[1]), int(shared[1]) if shared else 0, spilled)
        )
    print("\nrung            machine code:  FFMA  LDG 4 B  LDG 16 B  LDS 4 B  LDS 16 B")
    for name in BY_HAND:
        function = re.search(
            rf"Function : _Z{len(name)}{name}.*?(?=Function :|\Z)", code, re.S
        )[0]
        counts = [len(re.findall(rf"\b{word}(?![.\w])", function)) for word in MACHINE_CODE]
        cells = (f"{f'≈{n}':>{w}}" for n, w in zip(counts, (20, 9, 10, 9, 10), strict=True))
        print(f"{name:15}" + "".join(cells))
    print(
        "\nrung            threads  registers  shared bytes  blocks per SM  occupancy  spilled"
    )
    for name, threads, registers, shared, spilled in resources:
        blocks = blocks_per_sm(threads, registers, shared, 90)
        share = f"≈{100 * blocks * threads / 2048:.0f}%"
        print(f"{name:15} {threads:7}  {f'≈{registers}':>9}  {shared:12}", end="  ")
        print(f"{f'≈{blocks}':>13}  {share:>9}  {spilled:>7}")


if __name__ == "__main__":
    main()
