"""What Triton makes of the page's kernels for an A100 and an H100, read from the machine code.

The program needs neither GPU. Start it with the four programs as arguments. Registers and
shared memory decide how many blocks fit on an SM. The machine code shows how wide the loads
are, which instruction the tensor cores execute, and that no register was spilled. The last two
lines are about the persistent product, whose loads and stores are single TMA instructions.
"""

import importlib.util
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"  # the compiler, not the interpreter
import triton
from kernel_report import blocks_per_sm
from machine_code import count, machine_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nearly(number: int) -> str:
    """Print a number that changes a little with the version of the compiler."""
    return f"≈{number}" if number else "0"


# --8<-- [start:compile]
def compile_for(capability: int, kernel, pointers: str, warps: int, **sizes: int):
    """Compile `kernel` for pointers of one type. All sizes and strides are multiples of 16."""
    signature = {
        name: "constexpr" if name in sizes
        else pointers if name.endswith("_ptr")
        else "fp32" if name == "eps" else "i32"
        for name in kernel.arg_names
    }  # fmt: skip
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, kind in enumerate(signature.values())
        if kind not in ("constexpr", "fp32")
    }
    source = ASTSource(kernel, signature, constexprs=sizes, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": warps, "num_stages": 3})


# --8<-- [end:compile]


def main() -> None:
    if len(sys.argv) != 5:
        sys.exit("start it as: python triton_report.py MATMUL SOFTMAX LAYER_NORM PERSISTENT")
    matmul, softmax, norm, persistent = (load(path) for path in sys.argv[1:])
    product = {"K": 8192, "BM": 128, "BN": 256, "BK": 64, "GROUP": 8}
    print("                       registers  shared  blocks  loads of 16 B  cp.async")
    print(
        "kernel          target  a thread   bytes  per SM     (narrower)      16 B  LDSM  BAR"
    )
    for name, kernel, pointers, warps, sizes in (
        ("softmax", softmax.softmax_kernel, "*fp32", 8, {"BLOCK": 4096}),
        ("norm, forward", norm.forward_kernel, "*fp32", 4, {"BLOCK": 4096}),
        ("norm, backward", norm.backward_kernel, "*fp32", 4, {"BLOCK": 4096}),
        ("product", matmul.matmul_kernel, "*bf16", 8, product),
    ):
        for capability in (80, 90):
            binary = compile_for(capability, kernel, pointers, warps, **sizes)
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                Path(file.name).write_bytes(binary.asm["cubin"])
                ((registers, local, code, _),) = machine_code(Path(file.name)).values()
            assert local == 0 and count(r"(?:LDL|STL)\S*", code) == 0  # no spills
            shared = binary.metadata.shared
            blocks = blocks_per_sm(32 * warps, registers, shared, capability)
            wide, loads, copies, fragments, barriers = (
                count(rf"{x}\S*", code)
                for x in (r"LDG\.E\.128", r"LDG\.E", r"LDGSTS\.E\.\S*128", "LDSM", r"BAR\.SYNC")
            )
            products = re.findall(r"\bHG?MMA\.[\dx]+", " ".join(code))
            # the backward kernel also loads one mean and one 1/σ for each row
            assert loads - wide == (2 if name == "norm, backward" else 0)
            assert bool(wide) != (name == "product")
            assert bool(copies) == bool(products) == (name == "product")
            print(
                f"{name:15} sm_{capability} {f'≈{registers}':>8} {shared:7} {blocks:7}"
                f" {f'≈{wide} ({loads - wide})':>14} {nearly(copies):>9} {nearly(fragments):>5}"
                f" {f'≈{barriers}':>4}"
                + (f"  {len(products)} {products[0]}" if products else "")
            )

    print("\npersistent, sm_90  registers  shared  UTMALDG  UTMASTG  HGMMA  in HGMMA's loop")
    for flatten in (False, True):
        kernel = persistent.persistent_kernel.fn
        binary = compile_for(90, kernel, "*bf16", 8, **product, FLATTEN=flatten)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(binary.asm["cubin"])
            ((registers, local, code, loops),) = machine_code(Path(file.name)).values()
        assert local == 0 and count(r"(?:LDL|STL|LDG|STG)\S*", code) == 0  # TMA moves it all
        (loop,) = (x for x in loops if count(r"HGMMA\S*", x))
        loads, stores, products = (
            count(rf"{x}\S*", code) for x in ("UTMALDG", "UTMASTG", "HGMMA")
        )
        together = [x for x in ("UTMALDG", "UTMASTG") if count(rf"{x}\S*", loop)]
        assert (
            together == ["UTMALDG", "UTMASTG"][: 1 + flatten]
        )  # if flattened, C is stored while loads go on
        print(
            f"flatten={flatten!s:10} {f'≈{registers}':>9} {binary.metadata.shared:7}"
            f" {loads:8} {stores:8} {products:6}  {' and '.join(together)}"
        )


if __name__ == "__main__":
    main()
