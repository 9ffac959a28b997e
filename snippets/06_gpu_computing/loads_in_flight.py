"""How many bytes the threads of an SM have requested before they need the first of them.

    python loads_in_flight.py vector_add.cu reduction.cu

nvcc compiles the kernels for an H100 (sm_90) and for an A100 (sm_80). No GPU is needed. In
the machine code for the H100, the program counts the load instructions that a thread issues
before it uses the result of one of them. The last column is the bytes of one thread times the
number of threads that fit on an SM. The registers of a thread can limit this number. Compare
the last two rows with the row `reduce`: one row unrolls the loop four times instead of twice,
and one row has an unsigned index. The program imports kernel_report.py and machine_code.py.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from kernel_report import blocks_per_sm
from machine_code import machine_code

BLOCK = 256


# --8<-- [start:variants]
VARIANTS = {  # row: program, function, old and new word of its source
    "add": ("vector_add.cu", "add", "", ""),
    "add_loop": ("vector_add.cu", "add_loop", "", ""),
    "add_wide": ("vector_add.cu", "add_wide", "", ""),
    "reduce": ("reduction.cu", "reduce", "", ""),
    "reduce, 4 turns": ("reduction.cu", "reduce", "unroll 2", "unroll 4"),
    "reduce, unsigned": ("reduction.cu", "reduce", "long long", "unsigned long long"),
}
# --8<-- [end:variants]


def kernels_of(row: int, program: str, old: str, new: str) -> str:
    """The marked kernels of a program, without its host code, in a namespace of their own."""
    text = Path(program).read_text()
    parts = re.findall(r"\[start:(?!launch)\w+\]\n(.*?)// --8<-- \[end", text, re.S)
    source = "\n".join(parts)
    assert old in source
    source = source.replace(old, new) if old else source
    if program == "reduction.cu":  # a template must be instantiated
        length = new if old == "long long" else "long long"
        arguments = f"const float *, {length}, float *, int *"
        source += f"template __global__ void reduce<SHUFFLES>({arguments});"
        source = f"constexpr int BLOCK = {BLOCK};\n{source}"
    return f"namespace row{row} {{\n{source}\n}}\n"


def compile_for(capability: int, source: str) -> dict[str, tuple[int, list[str]]]:
    """Registers and instructions of each kernel, by its mangled name."""
    with tempfile.TemporaryDirectory() as folder:
        path, cubin = Path(folder, "kernels.cu"), Path(folder, "kernels.cubin")
        path.write_text(source)
        command = ["nvcc", "-O3", "-std=c++17", f"-arch=sm_{capability}", "-cubin", "-o", cubin]
        subprocess.run([*command, path], check=True)
        return {name: (kernel[0], kernel[2]) for name, kernel in machine_code(cubin).items()}


# --8<-- [start:together]
def loads_together(code: list[str]) -> tuple[int, int]:
    """The largest number of loads, and of bytes, that a thread issues before it must wait."""
    loads, size, most, awaited = 0, 0, (0, 0), set()
    for line in code:
        load = re.search(r"\bLDG\.E(\.128)?\S* R(\d+)", line)
        if load:
            loads, size = loads + 1, size + (16 if load[1] else 4)
            first, registers = int(load[2]), 4 if load[1] else 1
            awaited |= {f"R{first + i}" for i in range(registers)}
            most = max(most, (loads, size), key=lambda pair: pair[1])
        elif awaited & set(re.findall(r"\bR\d+\b", line)):
            loads, size, awaited = 0, 0, set()  # this instruction waits
    return most


# --8<-- [end:together]


def main() -> None:
    programs = sorted({program for program, *_ in VARIANTS.values()})
    if sorted(sys.argv[1:]) != programs:
        sys.exit("start it as: python loads_in_flight.py vector_add.cu reduction.cu")
    for name in programs:
        if not Path(name).is_file():
            sys.exit(f"loads_in_flight.py: there is no file {name} here; copy it")
    if not shutil.which("nvcc"):
        sys.exit("loads_in_flight.py needs nvcc, of the CUDA toolkit (but no GPU)")
    source = "".join(
        kernels_of(row, program, old, new)
        for row, (program, _, old, new) in enumerate(VARIANTS.values())
    )
    compiled = {capability: compile_for(capability, source) for capability in (90, 80)}
    print("                  loads of a thread         registers on   blocks   KiB requested")
    print("kernel            before it waits    bytes   9.0 and 8.0   per SM       in an SM")
    kib, blocks = {}, {}
    for row, (name, (_, function, _, _)) in enumerate(VARIANTS.items()):
        start = f"_ZN4row{row}{len(function)}{function}"
        (registers, code), (older, _) = (
            next(kernel for mangled, kernel in kernels.items() if mangled.startswith(start))
            for kernels in compiled.values()
        )
        loads, size = loads_together(code)
        blocks[name] = blocks_per_sm(BLOCK, registers, 1024, 90)
        kib[name] = size * blocks[name] * BLOCK // 1024
        print(
            f"{name:17} {f'≈{loads}':>17} {f'≈{size}':>8} {f'≈{registers} ≈{older}':>13}"
            f" {f'≈{blocks[name]}':>8} {f'≈{kib[name]}':>15}"
        )
    assert kib["add"] == 2 * 4 * 2048 // 1024  # two loads of 4 bytes, 2,048 threads
    assert kib["add_loop"] == kib["add_wide"] == 4 * kib["add"]
    assert kib["reduce, unsigned"] < kib["reduce"] < kib["reduce, 4 turns"]
    assert blocks["reduce, 4 turns"] < blocks["reduce"] == 8


if __name__ == "__main__":
    main()
