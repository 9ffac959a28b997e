"""Where a product keeps its sums: in registers on an H100, in tensor memory on a B200.

One Triton kernel, compiled here for three GPUs that are not here. Tiles of 128 rows and their
sums in fp32: with four warps a tile of 256 columns is 256 numbers for each thread, and a
thread has 255 registers. Tensor memory has 512 columns of 128 rows, 4 bytes each.
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
    a_ptr, b_ptr, c_ptr, K, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of C per program, for sizes that the tiles divide."""
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
def built(capability: int, columns: int) -> triton.compiler.CompiledKernel:
    pointers = dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*bf16")
    numbers = dict.fromkeys(("K", "a_stride", "b_stride", "c_stride"), "i32")
    tiles = {"BM": ROWS, "BN": columns, "BK": DEPTH}
    signature = pointers | numbers | dict.fromkeys(tiles, "constexpr")
    multiples = {(i,): [["tt.divisibility", 16]] for i in range(7)}
    source = ASTSource(tile_kernel, signature, constexprs=tiles, attrs=multiples)
    options = {"num_warps": WARPS, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """A thread's registers, and the bytes of stack into which others were spilled."""
    tools = Path(importlib.util.find_spec("triton").origin).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        said = subprocess.check_output([tools / "cuobjdump", "-res-usage", path], text=True)
    return int(re.search(r"REG:(\d+)", said)[1]), int(re.search(r"STACK:(\d+)", said)[1])


# --8<-- [end:compile]


def main() -> None:
    a, b = torch.randn(256, 128).half(), torch.randn(128, 256).half()
    c = torch.empty(256, 256)  # is what is compiled a product at all?
    interpreted = InterpretedFunction(tile_kernel.fn)
    interpreted[(2, 2)](a, b, c, 128, 128, 256, 256, BM=ROWS, BN=128, BK=DEPTH)
    torch.testing.assert_close(
        c, (a.float() @ b.float()).bfloat16().float(), rtol=1e-2, atol=0.1
    )

    print("         sums                          tensor memory,  registers  spilled,")
    print("target   in fp32     product           columns         a thread   bytes")
    found = {}
    for capability in (90, 100, 120):
        for columns in (128, 256):
            kernel = built(capability, columns)
            ptx = kernel.asm["ptx"]
            (product,) = set(re.findall(r"tcgen05\.mma|wgmma\.mma_async|mma\.sync", ptx))
            used, stack = resources(kernel.asm["cubin"])
            held = kernel.metadata.tmem_size
            found[capability, columns] = product, held, stack > 0
            target = re.search(r"\.target (\w+)", ptx)[1]
            spilled = f"≈{stack}" if stack else "0"
            row = f"{target:8} {f'{ROWS} × {columns}':11} {product:17} {held:<15} "
            print(f"{row}{f'≈{used}':11}{spilled}")
    for columns in (128, 256):
        wide = columns == 256  # then the sums alone are more than a thread has registers for
        assert found[90, columns] == ("wgmma.mma_async", 0, wide)
        assert found[100, columns] == ("tcgen05.mma", columns, False)  # a column for a column
        assert found[120, columns] == ("mma.sync", 0, wide)


if __name__ == "__main__":
    main()
