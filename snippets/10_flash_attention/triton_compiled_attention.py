"""What the compiler makes of the kernels for an A100 and an H100, on a machine with neither.

Start it with the two kernel programs as arguments. For each tile: the tensor-core instruction,
the shared memory, and whether it fits into what a block may have.
"""

import importlib.util
import os
import re
import sys

os.environ["TRITON_INTERPRET"] = "0"  # the compiler, not the interpreter
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

LIMIT = {80: 163, 90: 227}  # KiB of shared memory that one block may have
TENSORS = {"lse_ptr": "*fp32", "delta_ptr": "*fp32", "q_starts": "*i32", "k_starts": "*i32"}
NUMBERS = {"scale": "fp32", "tokens": "i32"}


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --8<-- [start:compile]
def compiled(
    kernel, capability: int, d: int, causal: bool, bm: int, bn: int, warps: int, stages
):
    """The kernel for 32 heads over 8 key heads in bf16, all pointers multiples of 16."""
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


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("start it as: python triton_compiled_attention.py FORWARD BACKWARD")
    forward, backward = (load(path) for path in sys.argv[1:])
    print("d = 128; shared memory in KiB")
    print("kernel   target tile      warps stages   instruction      shared memory")
    for name, kernel, capability, d, bm, bn, warps, stages in (
        ("forward", forward.forward_kernel, 80, 128, 128, 64, 8, 3),
        ("forward", forward.forward_kernel, 90, 128, 128, 128, 8, 3),
        ("forward", forward.forward_kernel, 90, 128, 128, 128, 8, 2),
        ("dK, dV", backward.dkdv_kernel, 80, 128, 64, 128, 8, 2),
        ("dK, dV", backward.dkdv_kernel, 90, 128, 64, 128, 8, 2),
        ("dQ", backward.dq_kernel, 80, 128, 128, 64, 8, 2),
        ("dQ", backward.dq_kernel, 90, 128, 128, 64, 8, 2),
    ):
        binary = compiled(kernel, capability, d, True, bm, bn, warps, stages)
        (instruction,) = set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.", binary.asm["ptx"]))
        kib = binary.metadata.shared / 1024
        verdict = "fits" if kib <= LIMIT[capability] else "too much"
        assert instruction == ("wgmma.mma_async" if capability == 90 else "mma.sync")
        print(
            f"{name:8} sm_{capability}  {bm:3} x {bn:3} {warps:5} {stages:6}   {instruction:15}"
            f"  {kib:3.0f} of {LIMIT[capability]}, {verdict}"
        )


if __name__ == "__main__":
    main()
