"""The problem that the programs softmax_*.py solve, each in its own language.

Each of them imports this file, so that the rows, the reference and the bound of the error are
the same for all languages. Without a GPU, a program compiles its kernel for sm_90, runs the PTX
on a CPU, compares the result, and prints what the machine code uses. On a GPU, it compares the
result of the GPU and measures the speed. softmax_cuda.cu states the same problem in C++.

    python softmax_problem.py                     shows that the check finds wrong kernels
    python softmax_problem.py CUDA softmax_cuda   prints the table for an executable

In the output of the first command, look at the last lines: each wrong kernel passes the check
for one of the rows or widths, and fails for another.
"""

import contextlib
import io
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from kernel_report import blocks_per_sm, cuobjdump
from ptx_on_cpu import run_rows

# --8<-- [start:problem]
OFFSETS = 0, 1000, -1000  # of three rows; exp(1000) is infinite, and exp(-1000) is 0
WIDTHS = 4096, 1000  # columns: a row that fills its block, and a row that does not
LARGE = 16384, 4096  # rows and columns of the speed test on a GPU
BOUND = 160 * 2.0**-24  # of the relative error, from the rounding to fp32


def make_rows(columns: int) -> np.ndarray:
    """Return the test rows [3, columns] in fp32: an offset + 8 sin(0.7 i)."""
    wave = 8 * np.sin(0.7 * np.arange(columns))
    return (np.array(OFFSETS)[:, None] + wave).astype(np.float32)


def expected(x: np.ndarray) -> np.ndarray:
    """Return the softmax of the test rows in float64. The offset replaces the maximum."""
    powers = np.exp(x.astype(float) - np.array(OFFSETS)[:, None])
    return powers / powers.sum(axis=1, keepdims=True)


def check(name: str, softmax) -> None:
    """Compare `softmax`, a function of an array [rows, columns], with float64."""
    for columns in WIDTHS:
        x = make_rows(columns)
        result, wanted = softmax(x), expected(x)
        assert result.shape == wanted.shape and result.dtype == np.float32
        error = np.abs(result / wanted - 1).max()
        assert error <= BOUND, f"{name}, rows of {columns}: the relative error is {error:.1e}"
        print(f"{name}, rows of {columns}: equal to float64, relative error ≈{error:.0e}")


# --8<-- [end:problem]
# --8<-- [start:speed]
def clocks() -> str:
    """Return the clocks of the GPU at this moment."""
    command = "nvidia-smi --query-gpu=clocks.sm,clocks.mem --format=csv,noheader,nounits"
    done = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    sm, memory = done.stdout.splitlines()[0].split(",")
    return f"SM clock ≈{int(sm)} MHz, memory clock ≈{int(memory)} MHz"


def measure(name: str, softmax) -> None:
    """Print the speed of `softmax` on a GPU as a fraction of the speed of a copy."""
    import torch

    x = torch.randn(LARGE, device="cuda")
    out = torch.empty_like(x)

    def milliseconds(run) -> float:
        """Median time of one call. A sample has 10 calls, so that the GPU never waits."""
        for _ in range(3):
            run()
        samples = []
        for _ in range(15):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                run()
            stop.record()
            stop.synchronize()
            samples.append(start.elapsed_time(stop) / 10)
        return statistics.median(samples)

    copy, ours = milliseconds(lambda: out.copy_(x)), milliseconds(lambda: softmax(x))
    library = milliseconds(lambda: x.softmax(dim=-1))
    for _ in range(5000):  # work for about a second, during which the clocks are read
        out.copy_(x)
    print(f"a copy moves ≈{2e-6 * x.nbytes / copy:.0f} GB/s at {clocks()}")
    torch.cuda.synchronize()
    for which, time in ((name, ours), ("torch.softmax", library)):
        print(f"{which}: ≈{100 * copy / time:.0f}% of the copy's speed")


# --8<-- [end:speed]
class Binary(NamedTuple):
    """A kernel that was compiled for rows of one length."""

    cubin: bytes | Path  # or an executable
    ptx: str = ""  # empty if the compiler returns none
    parameters: tuple[int, ...] = ()  # of the kernel, after x and y
    shared: int = 0  # bytes of shared memory that the launch adds


def disassemble(binary: bytes | Path) -> str:
    """Return what cuobjdump prints: resources, attributes and instructions for sm_90."""
    options = ["-res-usage", "-elf", "-sass"]
    if isinstance(binary, Path):  # an executable may have code for several architectures
        command = [cuobjdump(), "-arch", "sm_90", *options, str(binary)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(binary)
        command = [cuobjdump(), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --8<-- [start:facts]
def facts(binary: Binary) -> dict[str, int]:
    """Read the machine code of a kernel: what a thread and a block of it use."""
    return summary(disassemble(binary.cubin), binary.shared)


def summary(text: str, extra_shared: int) -> dict[str, int]:
    """Count instructions and resources in what cuobjdump prints for one kernel."""
    threads = re.search(r"EIATTR_(?:REQNTID|MAX_THREADS)\s.*?Value:\s+(0x\w+)", text, re.S)
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    registers, stack, shared = map(int, usage.groups())
    shared += extra_shared - 1024 * (shared >= 1024)  # without the kilobyte of the system
    code = re.findall(r"/\*(\w{4,5})\*/ +(?:@!?U?P\d+ +)?(\S+) ?(.*?) ;", text)
    calls = [int(to.split("0x")[1], 16) for _, name, to in code if name == "CALL.REL.NOINC"]
    end = min(calls, default=1 << 30)  # where the subroutine of the exact division begins
    names = [name for at, name, _ in code if int(at, 16) < end and name != "NOP"]

    def count(pattern: str) -> int:
        return sum(bool(re.fullmatch(pattern, name)) for name in names)

    return {
        "threads": int(threads[1], 16),
        "elements": count(r"MUFU\.EX2"),  # a thread computes one exponential per element
        "registers": registers,
        "shared": shared,
        "blocks": blocks_per_sm(int(threads[1], 16), registers, shared, 90),
        "wide loads": count(r"LDG\.E\.128\S*"),
        "loads": count(r"LDG\.\S*"),
        "wide stores": count(r"STG\.E\.128\S*"),
        "stores": count(r"STG\.\S*"),
        "TMA": count(r"UTMA(?:LDG|STG)\S*|UBLKCP\S*"),
        "spills": stack + count(r"(?:LDL|STL)\S*"),
        "exact": len(calls),
        "instructions": len(names),
    }


# --8<-- [end:facts]
COLUMNS = (  # of the table: two lines of a heading, and the width
    ("threads x", "elements", 10), ("registers", "a thread", 11), ("shared", "bytes", 8),
    ("blocks", "per SM", 8), ("", "loads", 10), ("", "stores", 10), ("exact", "x / y", 7),
    ("code per", "element", 9),
)  # fmt: skip


def heading() -> str:
    """The two lines above the table."""
    lines = ("", "kernel, columns")
    return "\n".join(
        f"{name:17}" + "".join(f"{column[i]:>{column[2]}}" for column in COLUMNS)
        for i, name in enumerate(lines)
    )


def line(name: str, columns: int, found: dict[str, int], mark: str) -> str:
    """One line of the table. `mark` is put before numbers that another version may change."""
    each = found["elements"]
    assert columns <= LARGE[1] and found["threads"] * each >= columns
    assert not found["wide loads"] or 4 * found["wide loads"] == 4 * found["loads"] == each

    def width(kind: str) -> str:
        return f"{found[kind]} x {16 if found[f'wide {kind}'] else 4} B"

    cells = (
        f"{found['threads']} x {each}",
        f"{mark}{found['registers']}",
        found["shared"],
        f"{mark}{found['blocks']}",
        width("loads"),
        f"{found['TMA']} x TMA" if found["TMA"] else width("stores"),
        "yes" if found["exact"] else "no",
        f"{mark}{found['instructions'] / each:.0f}",
    )
    row = "".join(f"{cell:>{size}}" for cell, (*_, size) in zip(cells, COLUMNS, strict=True))
    return f"{f'{name}, {columns}':17}{row}" + ("  spilled" if found["spills"] else "")


def without_library(softmax, x):
    """Return softmax(x) of a tensor. It is an error if torch's own softmax computes it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            assert "softmax" not in str(operator), f"torch's {operator} runs"
            return operator(*args, **(kwargs or {}))

    with Watch():
        return softmax(x)


def run_program(kernels: dict, compiled, pinned: bool = True) -> None:
    """Check the kernels of a program, on a GPU if there is one, and report on them.

    `kernels` has for each name a function that computes the softmax of a tensor on a GPU.
    `compiled(rows, columns)` returns for each name the `Binary` for sm_90. `pinned` is false
    if the compiler comes with torch, so that its version is not always the same.
    """
    if shutil.which("nvidia-smi"):
        import torch

        for name, softmax in kernels.items():

            def run(x: np.ndarray, softmax=softmax) -> np.ndarray:
                return without_library(softmax, torch.from_numpy(x).cuda()).cpu().numpy()

            check(name, run)
            measure(name, softmax)
        return
    binaries = {columns: compiled(len(OFFSETS), columns) for columns in WIDTHS}
    found = {}
    for name in kernels:
        for columns in WIDTHS:
            found[name, columns] = facts(binaries[columns][name])
        if not binaries[WIDTHS[0]][name].ptx:
            print(f"{name}: without PTX, only a GPU can check the result")
            continue

        def run(x: np.ndarray, name: str = name) -> np.ndarray:
            binary, threads = binaries[x.shape[1]][name], found[name, x.shape[1]]["threads"]
            return run_rows(binary.ptx, x, threads, binary.parameters)

        check(name, run)
    print(heading())
    for (name, columns), numbers in found.items():
        print(line(name, columns, numbers, "" if pinned else "≈"))


# --8<-- [start:wrong]
def right(x: np.ndarray, top=None, masked: float = -np.inf, power=np.exp) -> np.ndarray:
    """Softmax in fp32, with each row in a block of 4096 or 1024 elements."""
    block = 1 << (x.shape[1] - 1).bit_length()
    padded = np.full((len(x), block), masked, np.float32)
    padded[:, : x.shape[1]] = x
    with np.errstate(all="ignore"):
        powers = power(padded - (padded.max(1, keepdims=True) if top is None else top))
        return (powers / powers.sum(axis=1, keepdims=True))[:, : x.shape[1]]


WRONG = {
    "no maximum is subtracted": {"top": np.float32(0)},
    "elements beyond the row are 0": {"masked": 0.0},
    "elements beyond the row are -900": {"masked": -900.0},
    "differences in half precision": {"power": lambda x: np.exp(x.astype("e"), dtype="f")},
    "base 2 and not e": {"power": np.exp2},
}
# --8<-- [end:wrong]


def errors(softmax) -> list[float]:
    """Return the largest relative error for each width and each of the three rows."""
    found = []
    for columns in WIDTHS:
        result, wanted = softmax(make_rows(columns)), expected(make_rows(columns))
        with np.errstate(all="ignore"):
            found += np.abs(result / wanted - 1).max(axis=1).tolist()
    return found


def rejected(softmax) -> bool:
    """Return whether `check` finds a fault. What it prints is hidden."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            check("kernel", softmax)
    except AssertionError:
        return True
    return False


def one_wrong_number(x: np.ndarray, columns: int, row: int) -> np.ndarray:
    """Return the softmax of x. For one width, the last number of one row is wrong."""
    result = right(x)
    if x.shape[1] == columns:
        result[row, -1] *= 1 + 3 * BOUND
    return result


SAMPLE = """REG:40 STACK:0 SHARED:1152
EIATTR_REQNTID
    Value: 0x80 0x1 0x1
/*0000*/ @!P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
/*0010*/ LDG.E R8, desc[UR4][R2.64+0x10] ;
/*0020*/ MUFU.EX2 R4, R4 ;
/*0030*/ CALL.REL.NOINC 0x60 ;
/*0040*/ STG.E desc[UR4][R2.64], R4 ;
/*0050*/ EXIT ;
/*0060*/ MUFU.RCP R4, R4 ;
/*0070*/ NOP ;"""


def main() -> None:
    if len(sys.argv) == 3 and Path(sys.argv[2]).is_file():
        print(heading())
        print(line(sys.argv[1], LARGE[1], facts(Binary(Path(sys.argv[2]))), "≈"))
        return
    if len(sys.argv) > 1:
        sys.exit("start it as: python softmax_problem.py LANGUAGE FILE_WITH_MACHINE_CODE")
    counted = {name: number for name, number in summary(SAMPLE, 16).items() if number}
    assert counted == {
        "threads": 128, "elements": 1, "registers": 40, "shared": 144, "blocks": 12,
        "wide loads": 1, "loads": 2, "stores": 1, "exact": 1, "instructions": 6,
    }  # fmt: skip
    print(f"rows of {' and '.join(map(str, WIDTHS))}, around {', '.join(map(str, OFFSETS))}")
    assert max(errors(right)) <= BOUND
    print(f"NumPy in fp32: relative error ≈{max(errors(right)):.0e}, allowed {BOUND:.1e}")
    for name, change in WRONG.items():
        fine = sum(error <= BOUND for error in errors(lambda x: right(x, **change)))  # noqa: B023
        assert fine < len(WIDTHS) * len(OFFSETS)
        assert rejected(lambda x: right(x, **change)), name  # noqa: B023
        print(f"{name}: {fine} of {len(WIDTHS) * len(OFFSETS)} rows are right")
    assert not rejected(right) and rejected(expected)  # `expected` returns float64
    for columns in WIDTHS:
        for row in range(len(OFFSETS)):
            assert rejected(lambda x: one_wrong_number(x, columns, row))  # noqa: B023


if __name__ == "__main__":
    main()
