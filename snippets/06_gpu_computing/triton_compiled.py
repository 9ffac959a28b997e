"""What Triton makes of one kernel for two GPUs, compiled on a machine that has neither.

The compiler needs no GPU, only the name of one. A pointer or stride known to be a multiple of
16 is part of the signature: without it the copies become loads of single elements, and of each
matrix one tile is held instead of several.
"""

import os
import re

os.environ.pop("TRITON_INTERPRET", None)  # the compiler, not the interpreter
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def matmul_kernel(
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
    tl.store(c_ptr + m[:, None] * c_stride + n[None, :], total)


POINTERS = {"a_ptr": "*bf16", "b_ptr": "*bf16", "c_ptr": "*fp32"}
NUMBERS = dict.fromkeys(("K", "a_stride", "b_stride", "c_stride"), "i32")
TILES = {"BM": 128, "BN": 128, "BK": 64}


def compiled(capability: int, aligned: bool):
    """The kernel for one compute capability, with or without the promise of alignment."""
    signature = POINTERS | NUMBERS | dict.fromkeys(TILES, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(7)} if aligned else {}
    source = ASTSource(matmul_kernel, signature, constexprs=TILES, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": 8, "num_stages": 3})


def main() -> None:
    a, b = torch.randn(256, 128).half(), torch.randn(128, 256).half()
    c = torch.empty(256, 256)
    interpreted = InterpretedFunction(matmul_kernel.fn)  # is what is compiled a product at all?
    interpreted[(2, 2)](a, b, c, 128, 128, 256, 256, **TILES)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-3, atol=1e-2)
    print("target  multiple of 16   instruction      copies          tiles held  shared memory")
    for capability, aligned, expected in (
        (80, True, ("mma.sync", "cp.async, 16 B", 2)),
        (90, True, ("wgmma.mma_async", "cp.async, 16 B", 3)),
        (90, False, ("wgmma.mma_async", "ld.global, 2 B", 1)),
    ):
        kernel = compiled(capability, aligned)
        ptx = kernel.asm["ptx"]
        (tensor,) = set(re.findall(r"\b(wgmma\.mma_async|mma\.sync)\.", ptx))
        if re.search(r"cp\.async\.cg\S+ \[[^;]*, 0x10", ptx):
            copies = "cp.async, 16 B"
        else:
            (width,) = set(re.findall(r"ld\.global\.b(\d+)", ptx))
            copies = f"ld.global, {int(width) // 8} B"
        # a buffer for the tiles of A: "128x64xbf16" for one, "3x128x64xbf16" for three
        held = re.search(r"local_alloc.*memdesc<(?:(\d+)x)?128x64xbf16", kernel.asm["ttgir"])
        tiles = int(held[1] or 1)
        assert (tensor, copies, tiles) == expected, (tensor, copies, tiles)
        print(
            f"sm_{capability}   {'promised' if aligned else 'not':14}   {tensor:15}"
            f"  {copies:14}  {f'{tiles} + {tiles}':10}  {kernel.metadata.shared:7} bytes"
        )
    try:
        triton.runtime.driver.active.get_current_device()
        print("and this machine could run it")
    except RuntimeError as error:
        print(f"to launch it here: RuntimeError: {error}")


if __name__ == "__main__":
    main()
