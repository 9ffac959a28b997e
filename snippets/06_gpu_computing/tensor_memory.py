"""A matrix product keeps its sums in registers on an H100, and in tensor memory on a B200.

The program compiles one Triton kernel for three kinds of GPUs, and it needs none of them. A
tile of 128 × 256 sums in fp32 is 256 numbers for each thread of four warps, but a thread can
use only 255 registers. So look at the column "spilled". Tensor memory has 128 rows and 512
columns of 4 bytes.
"""

import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # the compiler, not the interpreter
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction

ROWS, DEPTH, WARPS = 128, 64, 4


@triton.jit
def tile_kernel(
    a_ptr, b_ptr, c_ptr, a_stride, b_stride, c_stride, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of C per program, for sizes that are multiples of the tiles."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_ptr + m[:, None] * a_stride + k[None, :]
    b_at = b_ptr + k[:, None] * b_stride + n[None, :]
    total = tl.full((BM, BN), 0, dtype=tl.float32)
    for _ in range(0, K, BK):
        total = tl.dot(tl.load(a_at), tl.load(b_at), total)
        a_at += BK
        b_at += BK * b_stride
    tl.store(c_ptr + m[:, None] * c_stride + n[None, :], total.to(tl.bfloat16))


# --8<-- [start:compile]
def compile_tile(capability: int, columns: int) -> triton.compiler.CompiledKernel:
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16")
    strides = dict.fromkeys(("a_stride", "b_stride", "c_stride"), "i32")
    sizes = {"K": 4096, "BM": ROWS, "BN": columns, "BK": DEPTH}
    signature = pointers | strides | dict.fromkeys(sizes, "constexpr")
    multiples = {(i,): [["tt.divisibility", 16]] for i in range(6)}
    source = ASTSource(tile_kernel, signature, constexprs=sizes, attrs=multiples)
    options = {"num_warps": WARPS, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack per thread, which contain spilled registers."""
    tools = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        report = subprocess.check_output([tools / "cuobjdump", "-res-usage", path], text=True)
    return int(re.search(r"REG:(\d+)", report)[1]), int(re.search(r"STACK:(\d+)", report)[1])


# --8<-- [end:compile]


def main() -> None:
    a, b = torch.randn(256, 128).half(), torch.randn(128, 256).half()
    c = torch.empty(256, 256)
    interpreted = InterpretedFunction(tile_kernel.fn)  # does the kernel multiply at all?
    interpreted[(2, 2)](a, b, c, 128, 256, 256, K=128, BM=ROWS, BN=128, BK=DEPTH)
    torch.testing.assert_close(
        c, (a.float() @ b.float()).bfloat16().float(), rtol=1e-2, atol=0.1
    )

    print("         sums                          tensor memory,  registers  spilled,")
    print("target   in fp32     product           columns         a thread   bytes")
    found = {}
    for capability in (90, 100, 120):
        for columns in (128, 256):
            kernel = compile_tile(capability, columns)
            ptx = kernel.asm["ptx"]
            (product,) = set(re.findall(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", ptx))
            used, stack = resources(kernel.asm["cubin"])
            columns_used = kernel.metadata.tmem_size
            found[capability, columns] = product, columns_used, stack > 0
            target = re.search(r"\.target (\w+)", ptx)[1]
            spilled = f"≈{stack}" if stack else "0"
            row = f"{target:8} {f'{ROWS} × {columns}':11} {product:17} {columns_used:<15} "
            print(f"{row}{f'≈{used}':11}{spilled}")
    for columns in (128, 256):
        wide = columns == 256  # a thread has too few registers for the sums alone
        assert found[90, columns] == ("wgmma.mma_async", 0, wide)
        assert found[100, columns] == ("tcgen05.mma", columns, False)  # one per column
        assert found[120, columns] == ("mma.sync", 0, wide)


if __name__ == "__main__":
    main()
