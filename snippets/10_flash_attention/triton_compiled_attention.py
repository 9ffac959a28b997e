"""This program compiles the kernels for an A100 and an H100, on a machine with neither.

Start it with the two kernel programs as arguments. The first table shows the shared memory of
each configuration. The second table shows registers and spills, the number of blocks that fit
on an SM, and the clocks for which one tile occupies the tensor cores and the schedulers. The
kernel `pointers` is forward with one change: its loops carry a pointer for each element.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # the compiler, not the interpreter
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

Code = list[str]
PER_BLOCK = {80: 163, 90: 227}  # KiB of shared memory that one block may use
FLOPS = {80: 2048, 90: 4096}  # per clock on the tensor cores of an SM, with 16-bit factors
TENSORS = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "q_starts": "*i32", "k_starts": "*i32"}
NUMBERS = {"scale": "fp32", "tokens": "i32"}
PRODUCTS = {"forward": 2, "pointers": 2, "dK, dV": 4, "dQ": 3}  # products per tile


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_pointers(path: str):
    """Load the forward program, changed so that its loops carry a tile of pointers."""
    text = Path(path).read_text("utf-8")
    for scalar, tile in (
        ("        k_tile, v_tile = k_ptr + tile, v_ptr + tile\n", ""),
        ("+ c[None, :]\n        for start", "+ c[None, :]\n"
         "        k_tile, v_tile = k_ptr + tile + at, v_ptr + tile + at\n        for start"),
        ("k_tile + at, v_tile + at", "k_tile, v_tile"),
    ):  # fmt: skip
        assert scalar in text
        text = text.replace(scalar, tile)
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "pointers.py"
        changed.write_text(text, "utf-8")
        return load(str(changed))


# --8<-- [start:compile]
def compiled(
    kernel, capability: int, d: int, causal: bool, bm: int, bn: int, warps: int, stages
):
    """Compile the kernel for 32 query and 8 key heads in bf16, with pointers aligned to 16."""
    sizes = {"HEADS": 32, "KV_HEADS": 8, "D": d, "CAUSAL": causal, "BM": bm, "BN": bn}
    signature = {
        name: "constexpr" if name in sizes else (TENSORS | NUMBERS).get(name, "*bf16")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


# --8<-- [end:compile]
def cuobjdump() -> str:
    """The disassembler: CUDA's, or the one in Triton's package."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump" if triton else None
    found = shutil.which("cuobjdump") or (beside and beside.exists() and str(beside))
    return found or sys.exit("cuobjdump is missing: pip install triton brings it")


# --8<-- [start:machine]
def machine_code(cubin: Path) -> dict[str, tuple[int, int, Code, list[Code]]]:
    """Return registers, bytes of local memory, code and innermost loops of each kernel."""
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
    """Return how many blocks fit on one SM of an A100 (8.0) or an H100 (9.0)."""
    warps = threads // 32
    by_registers = 65536 // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    per_sm = {80: 164, 90: 228}[capability] * 1024  # CUDA reserves 1 KiB of it per block
    by_shared = per_sm // (-(-(shared + 1024) // 128) * 128)
    return min(64 // warps, by_registers, by_shared, 32)


# --8<-- [end:machine]
def nearly(number: int) -> str:
    """Mark a number that changes a little from one compiler version to the next."""
    return f"≈{number}" if number else "0"


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("start it as: python triton_compiled_attention.py FORWARD BACKWARD")
    forward, backward = (load(path) for path in sys.argv[1:])
    pointers = with_pointers(sys.argv[1])
    print("d = 128, 8 warps; shared memory in KiB")
    print("kernel   target tile      stages  instruction      shared memory")
    rows = []
    for name, kernel, capability, bm, bn, stages in (
        ("forward", forward.forward_kernel, 80, 128, 64, 3),
        ("forward", forward.forward_kernel, 90, 128, 128, 4),
        ("forward", forward.forward_kernel, 90, 128, 128, 3),
        ("pointers", pointers.forward_kernel, 90, 128, 128, 2),
        ("dK, dV", backward.dkdv_kernel, 80, 32, 128, 2),
        ("dK, dV", backward.dkdv_kernel, 90, 64, 128, 2),
        ("dQ", backward.dq_kernel, 80, 128, 64, 2),
        ("dQ", backward.dq_kernel, 90, 128, 64, 2),
    ):
        d, warps = 128, 8
        binary = compiled(kernel, capability, d, True, bm, bn, warps, stages)
        (instruction,) = set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.", binary.asm["ptx"]))
        shared = binary.metadata.shared
        fits = shared / 1024 <= PER_BLOCK[capability]
        verdict = "fits" if fits else "too much"
        assert instruction == ("wgmma.mma_async" if capability == 90 else "mma.sync")
        print(
            f"{name:8} sm_{capability}  {bm:3} x {bn:3} {stages:6}  {instruction:15}"
            f"  {shared / 1024:3.0f} of {PER_BLOCK[capability]}, {verdict}"
        )
        if fits:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(binary.asm["cubin"])
                ((registers, local, _, loops),) = machine_code(Path(file.name)).values()
            whole, cut = sorted((x for x in loops if count(r"HG?MMA\S*", x)), key=len)
            blocks = blocks_per_sm(32 * warps, registers, shared, capability)
            products = PRODUCTS[name] * 2 * bm * bn * d // FLOPS[capability]
            rows.append((name, capability, registers, local, blocks, products, whole, cut))

    print("\n                registers  local  blocks  spills in a  clocks of an SM for a tile")
    print(
        "kernel   target  a thread  bytes  per SM  whole   cut  products  whole    cut  in turn"
    )
    for name, capability, registers, local, blocks, products, *loops in rows:
        spills = [count(r"(?:LDL|STL)\S*", loop) for loop in loops]
        if name == "pointers" and triton.__version__ < "3.8":
            assert spills[1] > 100 and local > 400
        elif capability == 90 and (name != "dK, dV" or triton.__version__ < "3.9"):
            assert spills == [0, 0] and local < 100
        # each of the four schedulers issues at most one instruction per clock
        whole, cut = (len(loop) * warps // 4 for loop in loops)
        share = f"≈{100 * products / (products + whole):.0f}%"
        print(
            f"{name:8} sm_{capability}  {f'≈{registers}':>8}  {nearly(local):>5}  {blocks:6}"
            f"  {nearly(spills[0]):>5} {nearly(spills[1]):>5}  {products:8}"
            f"  {nearly(whole):>5}  {nearly(cut):>5}  {share:>7}"
        )


if __name__ == "__main__":
    main()
