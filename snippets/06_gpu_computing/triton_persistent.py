"""A persistent matrix product in Triton: one program per SM computes many tiles.

C [M, N] = A [M, K] B [K, N]. Tensor descriptors describe the matrices. On an H100, TMA carries
out the loads and stores, and the kernel needs no masks. The table counts what persistent
programs save: they start fewer blocks, and an SM fills its pipeline only once. In the last
wave, some SMs still have no tile (column idle).
"""

import os
import sys

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl

ON_GPU = torch.accelerator.is_available()
SMS = 132  # of an H100 SXM


# --8<-- [start:kernel]
def config(bm: int, bn: int, bk: int, warps: int, stages: int) -> triton.Config:
    sizes = {"BM": bm, "BN": bn, "BK": bk, "GROUP": 8}
    return triton.Config(sizes, num_warps=warps, num_stages=stages)


CONFIGS = [
    config(128, 256, 64, 8, 3),
    config(128, 128, 64, 8, 4),
    config(128, 128, 64, 4, 3),
]


@triton.autotune(CONFIGS if ON_GPU else [config(32, 64, 32, 4, 3)], key=["M", "N", "K"])
@triton.jit
def persistent_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr = True,
):  # fmt: skip
    a = tl.make_tensor_descriptor(a_ptr, [M, K], [K, 1], [BM, BK])
    b = tl.make_tensor_descriptor(b_ptr, [K, N], [N, 1], [BK, BN])
    c = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BM, BN])
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first, programs = tl.program_id(0), tl.num_programs(0)
    for tile in tl.range(first, rows * columns, programs, flatten=FLATTEN):
        row, column = place(tile, rows, columns, GROUP)
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):  # a load outside of the matrix is 0, a store is skipped
            total = tl.dot(a.load([row * BM, k]), b.load([k, column * BN]), total)
        c.store([row * BM, column * BN], total.to(c_ptr.dtype.element_ty))


# --8<-- [end:kernel]


@triton.jit
def place(program, rows, columns, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP tiles down, then one tile to the right."""
    in_group = GROUP * columns
    first = program // in_group * GROUP
    height = min(rows - first, GROUP)  # the last group may have fewer rows
    return first + program % in_group % height, program % in_group // height


def matmul(a: torch.Tensor, b: torch.Tensor, programs: int) -> torch.Tensor:
    """a [M, K] @ b [K, N] in fp16 or bf16, summed in fp32, by at most `programs` programs."""
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or not a.is_contiguous() or not b.is_contiguous():
        raise ValueError("matmul needs contiguous [M, K] and [K, N]")
    if k * a.itemsize % 16 or n * a.itemsize % 16:
        raise ValueError("TMA needs rows whose size is a multiple of 16 bytes")
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    grid = lambda x: (min(programs, triton.cdiv(m, x["BM"]) * triton.cdiv(n, x["BN"])),)  # noqa: E731
    persistent_kernel[grid](a, b, c, m, n, k)
    return c


# --8<-- [start:counts]
def counts(rows: int, columns: int, programs: int) -> tuple[int, float]:
    """The largest number of tiles of a program, and the fraction of SM time without a tile."""
    tiles = rows * columns
    walks = [range(first, tiles, programs) for first in range(programs)]
    assert sorted(tile for walk in walks for tile in walk) == list(range(tiles))
    waves = max(map(len, walks))
    assert waves == -(-tiles // programs)  # the same as with one block for each tile
    return waves, 1 - tiles / (waves * programs)


# --8<-- [end:counts]


def main() -> None:
    if not ON_GPU and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        sys.exit("triton_persistent.py needs Triton 3.7 for its interpreter, or a GPU")
    device = torch.accelerator.current_accelerator() if ON_GPU else torch.device("cpu")
    # a kernel stores each descriptor that it makes in 128 bytes of global memory
    triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    torch.manual_seed(0)
    for m, n, k, programs in ((64, 128, 64, 1), (200, 152, 72, 4), (200, 152, 72, 100)):
        a = torch.randn(m, k, device=device, dtype=torch.float16)
        b = torch.randn(k, n, device=device, dtype=torch.float16)
        torch.testing.assert_close(matmul(a, b, programs), a @ b, rtol=2e-3, atol=1e-3)
        print(f"{m} x {n} x {k}, programs: at most {programs}: equal to torch.matmul")

    print(f"\ntiles of 128 x 256, {SMS} SMs   blocks started     pipelines filled in an SM")
    print("   n  tiles  waves   idle    per SM  per tile     per SM  per tile")
    for n in (4096, 5120, 8192):
        tiles = n // 128 * (n // 256)
        waves, idle = counts(n // 128, n // 256, SMS)
        print(f"{n} {tiles:6} {waves:6} {idle:6.1%} {SMS:9} {tiles:9} {1:10} {waves:9}")

    if ON_GPU:
        a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16).unbind()
        torch_ms = triton.testing.do_bench(lambda: a @ b)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        for name, programs in (("a program to an SM", sms), ("a program to a tile", 2**30)):
            call = lambda p=programs: matmul(a, b, p)  # noqa: E731
            torch.testing.assert_close(call(), a @ b, rtol=2e-2, atol=1)
            ms = triton.testing.do_bench(call)
            print(f"8192³ in bf16, {name}: ≈{2 * 8192**3 / ms / 1e9:.0f} TFLOP/s", end=", ")
            print(f"≈{100 * torch_ms / ms:.0f}% of torch, which calls cuBLAS")
        print(f"chosen: {persistent_kernel.best_config}")


if __name__ == "__main__":
    main()
