"""Reads the machine code that nvcc makes of memory-bound kernels and of a tensor-core kernel.

Start it with softmax.cu, layer_norm.cu, histogram.cu, constant_memory.cu and tensor_cores.cu.
nvcc compiles them for an H100 (sm_90), and constant_memory.cu also for an A100 (sm_80). No GPU
is needed. The first table has a line for each loop over a row, as nvcc has unrolled it: the
instructions per element, the loads that a thread issues before an instruction needs the value
of one of them, and the bytes that all threads of an SM then have under way. Look at the loads
with and without __restrict__.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_report import blocks_per_sm, cuobjdump

Code = list[str]
PASSES = {  # for each kernel its loops over a row, in order
    "softmax.cu": {
        "three_passes": ("maximum", "sum", "result"),
        "online": ("both", "result"),
    },
    "layer_norm.cu": {
        "squares": ("sums", "result"),
        "two_passes": ("mean", "variance", "result"),
        "welford": ("moments", "result"),
    },
}


# --8<-- [start:read]
def machine_code(cubin: Path) -> dict[str, tuple[int, int, Code, list[Code]]]:
    """Return per kernel: registers, bytes of local memory, instructions, innermost loops."""
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
    """Return the number of instructions whose name matches the regular expression `pattern`."""
    return sum(bool(re.search(rf"\b(?:{pattern})(?![\w.])", line)) for line in code)


# --8<-- [end:read]
# --8<-- [start:together]
def together(loop: Code) -> int:
    """Return the number of loads before the first instruction that needs a loaded value."""
    loads, awaited = 0, set()
    for line in loop:
        if awaited & set(re.findall(r"\bR\d+\b", line)):
            break
        if load := re.search(r"\bLDG\.E\S* (R\d+)", line):
            loads += 1
            awaited.add(load[1])
    return loads


# --8<-- [end:together]
def compiled(
    source: str, *options: str, architecture: str = "sm_90"
) -> dict[str, tuple[int, int, Code, list[Code]]]:
    """Compile `source` and return its kernels by name; of a template, those for `unsigned`."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        command = ["nvcc", "-O3", "-std=c++17", f"-arch={architecture}", *options, "-cubin"]
        subprocess.run([*command, "-o", cubin, source], check=True)
        kernels = {}
        for mangled, kernel in machine_code(cubin).items():
            length, rest = re.match(r"_Z(\d+)(\w+)", mangled).groups()
            if "Watched" not in rest:
                kernels[rest[: int(length)]] = kernel
    return kernels


def rows_of(name: str) -> None:
    """Print a line for each loop over a row, with and without __restrict__."""
    ours, without = compiled(name), compiled(name, "-D__restrict__=")
    for kernel, passes in PASSES[name].items():
        registers, local, _, loops = ours[kernel]
        unrolled = [x for x in loops if count(r"LDG\.E\S*", x) >= 4]
        plain = [x for x in without[kernel][3] if count(r"LDG\.E\S*", x) >= 4]
        threads = 256 * blocks_per_sm(256, registers, 128, 90)
        assert local == 0  # no spilled registers: they would be loads and stores, too
        for at, loop, other in zip(passes, unrolled, plain, strict=True):
            assert count(r"LDG\.E\.(?:64|128)\S*", loop) == 0  # a load is 4 bytes
            each = len(loop) / count(r"LDG\.E\S*", loop)
            if count(r"STG\S*", loop):  # with the promise, no load waits for a store
                assert together(loop) >= 4 and together(other) == 1
            else:  # where nothing is stored, the promise changes nothing
                assert together(loop) == together(other)
            kib = together(loop) * 4 * threads // 1024
            print(
                f"{kernel:13} {at:9} {f'≈{each:.0f}':>8} {f'≈{together(loop)}':>15}"
                f" {f'(≈{together(other)})':6} {f'≈{kib}':>20}"
            )


def constants_of(name: str) -> None:
    """Print where three kernels find the 32 coefficients of a polynomial."""
    print("\ncoefficients    for   FFMA   of them with c[…]   ULDC.64   LDG")
    for architecture, number in (("sm_80", "8.0"), ("sm_90", "9.0")):
        kernels = compiled(name, architecture=architecture)
        for kernel in ("from_constant", "from_parameter", "from_global"):
            code = kernels[kernel][2]
            ffma, loads = count("FFMA", code), count(r"LDG\.E\S*", code)
            operands = sum("FFMA" in line and "c[" in line for line in code)
            uniform = count(r"ULDC\.64", code)
            print(f"{kernel:15} {number} {ffma:6} {operands:19} {f'≈{uniform}':>9} {loads:5}")
            assert ffma == 32  # a multiply-add for each coefficient
            if kernel == "from_global":  # x[i], and a load for each coefficient
                assert loads == 33 and operands == 0
            else:  # only x[i]: the coefficients are operands, or come in pairs
                assert loads == 1 and (operands == 32 or uniform >= 15)


def main() -> None:
    others = "histogram.cu", "constant_memory.cu", "tensor_cores.cu"
    if sorted(sys.argv[1:]) != sorted((*PASSES, *others)):
        sys.exit("start it as: python machine_code.py " + " ".join((*PASSES, *others)))
    for name in sys.argv[1:]:
        if not Path(name).is_file():
            sys.exit(f"machine_code.py: there is no file {name} here; copy it")
    if not shutil.which("nvcc"):
        sys.exit("machine_code.py needs nvcc, of the CUDA toolkit (but no GPU)")
    print("                         instructions  loads together in a thread  KiB under way")
    print("kernel        loop       an element    (without __restrict__)      in an SM")
    for name in PASSES:
        rows_of(name)

    print("\nhistogram     for 16 bytes")
    histogram = compiled("histogram.cu")
    for kernel, atomic in (("in_global", r"REDG\S*"), ("in_shared", r"ATOMS\.POPC\.INC\S*")):
        loop = max(histogram[kernel][3], key=lambda x: count(atomic, x))
        loads, atomics = count(r"LDG\.E\.128\S*", loop), count(atomic, loop)
        assert (loads, atomics) == (1, 16)
        words = atomic.removesuffix(r"\S*").replace("\\", "")
        print(f"{kernel:13} {loads} LDG.E.128, {atomics} {words}")

    constants_of("constant_memory.cu")

    print("\ntiled   registers  HMMA  LDSM  MOVM   LD")
    for factors, options in (("fp16", ()), ("bf16", ("-DBF16",))):
        registers, local, code, _ = compiled("tensor_cores.cu", *options)["tiled"]
        hmma, ldsm, movm, generic = (
            count(x, code) for x in (r"HMMA\S*", r"LDSM\S*", r"MOVM\S*", r"LD\.E\S*")
        )
        assert local == 0 and hmma == 128
        assert (ldsm > 0 and generic == 0) if factors == "fp16" else ldsm == 0
        print(f"{factors}   {f'≈{registers}':>10} {hmma:5} {ldsm:5} {movm:5} {generic:4}")


if __name__ == "__main__":
    main()
