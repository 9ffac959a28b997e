"""Matrix multiplication in Triton, and how the order of the programs changes the traffic.

C [M, N] = A [M, K] B [K, N]. Each program computes one tile of C. Programs that run at the same
time share strips of A and B in the L2 cache. If the programs are numbered row by row, 132 of
them need all strips of B. If they are numbered in groups of rows, as in Triton's tutorial, they
need far fewer strips.
"""

import contextlib
import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl


@triton.jit
def place(program, rows, columns, GROUP: tl.constexpr):
    """Row and column of a program's tile: GROUP tiles down, then one tile to the right."""
    in_group = GROUP * columns
    first = program // in_group * GROUP
    height = min(rows - first, GROUP)  # the last group may have fewer rows
    return first + program % in_group % height, program % in_group // height


@triton.jit
def places_kernel(out_ptr, rows, columns, GROUP: tl.constexpr):
    """Store the number of each program's tile, counted row by row."""
    row, column = place(tl.program_id(0), rows, columns, GROUP)
    tl.store(out_ptr + tl.program_id(0), row * columns + column)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K: tl.constexpr, a_stride, b_stride, c_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = place(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    m = row * BM + tl.arange(0, BM)
    n = column * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    a_at = a_ptr + m[:, None] * a_stride + k[None, :]  # [BM, BK] pointers
    b_at = b_ptr + k[:, None] * b_stride + n[None, :]  # [BK, BN]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, K, BK):
        a = tl.load(a_at, mask=(m[:, None] < M) & (k[None, :] < K - k0), other=0.0)
        b = tl.load(b_at, mask=(k[:, None] < K - k0) & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_at += BK
        b_at += BK * b_stride
    c_at = c_ptr + m[:, None] * c_stride + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(c_at, total.to(c_ptr.dtype.element_ty), mask=inside)


def matmul(
    a: torch.Tensor, b: torch.Tensor, tile=(32, 32, 32), group=8, c=None, programs=None,
    **options,
) -> torch.Tensor:  # fmt: skip
    """a [M, K] @ b [K, N] in fp16 or bf16, summed in fp32. All rows must be contiguous.

    K is a part of the compiled kernel, so each new K compiles a new kernel. Offsets have 32
    bits, so each matrix must have fewer than 2^31 elements. With `programs`, only the first
    programs run, and each of them stores its tile in `c`.
    """
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or a.stride(1) != 1 or b.stride(1) != 1:
        raise ValueError("matmul needs [M, K] and [K, N] whose rows are contiguous")
    c = torch.empty(m, n, dtype=a.dtype, device=a.device) if c is None else c
    bm, bn, bk = tile
    grid = (programs or triton.cdiv(m, bm) * triton.cdiv(n, bn),)
    matmul_kernel[grid](
        a, b, c, m, n, k, a.stride(0), b.stride(0), c.stride(0),
        BM=bm, BN=bn, BK=bk, GROUP=group, **options,
    )  # fmt: skip
    return c


def strips(rows: int, columns: int, together: int, group: int, device) -> tuple[int, int]:
    """How many strips of A and of B the first `together` programs need."""
    tiles = torch.empty(together, dtype=torch.int32, device=device)
    places_kernel[(together,)](tiles, rows, columns, GROUP=group)
    order = [  # three loops: over groups, to the right, and down through the group
        row * columns + column
        for first in range(0, rows, group)
        for column in range(columns)
        for row in range(first, min(first + group, rows))
    ]
    assert tiles.tolist() == order[:together]
    return len((tiles // columns).unique()), len((tiles % columns).unique())


def main() -> None:
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    for m, n, k in ((1, 1, 1), (31, 33, 17), (100, 70, 65)):
        # all rows are longer than the part that the product uses
        a = torch.randn(m, k + 1, device=device, dtype=torch.float16)[:, :k]
        b = torch.randn(k, n + 2, device=device, dtype=torch.float16)[:, :n]
        exact = (a.double() @ b.double()).half()
        torch.testing.assert_close(matmul(a, b, group=3), exact, rtol=2e-3, atol=1e-3)
        print(f"{m} x {n} x {k}: equal to float64 rounded to fp16")
    # the first five programs of the last product write a column of three tiles, and two more
    c = torch.full((100, 73), torch.nan, device=device, dtype=torch.float16)[:, :70]
    written = ~matmul(a, b, group=3, c=c, programs=5).isnan()
    torch.testing.assert_close(c[written], exact[written], rtol=2e-3, atol=1e-3)
    tiles = written[::32, ::32].nonzero().tolist()
    assert tiles == [[0, 0], [0, 1], [1, 0], [1, 1], [2, 0]]
    for wrong in ((a, b[1:]), (a.T.contiguous().T, b), (a, b.T.contiguous().T)):
        with contextlib.suppress(ValueError):
            matmul(*wrong)
            raise AssertionError("matmul accepted other sizes, or rows that are not contiguous")
    strips(7, 5, 35, 3, device)  # the last group has only one row
    # the grid of an 8192³ product with tiles of 128 × 256
    assert strips(64, 32, 132, 1, device) == (5, 32)
    assert strips(64, 32, 132, 8, device) == (8, 17)
    print("strips of A and B for the first programs of a 64 x 64 grid of tiles")
    for together in (132, 264):
        for group in (1, 4, 8, 16):
            a, b = strips(64, 64, together, group, device)
            if together == 132:  # g + R/g, rounded up to whole columns of a group
                assert group == 1 or (a, b) == (group, -(-together // group))
            print(f"{together} programs, groups of {group:2}: {a:2} + {b:2} = {a + b}")
    if on_gpu:
        a, b = torch.randn(2, 8192, 8192, device=device, dtype=torch.bfloat16).unbind()
        torch_ms = triton.testing.do_bench(lambda: a @ b)
        for group in (1, 8):
            options = {"num_warps": 8, "num_stages": 3}
            call = lambda g=group, o=options: matmul(a, b, (128, 256, 64), g, **o)  # noqa: E731
            torch.testing.assert_close(call(), a @ b, rtol=2e-2, atol=1)
            ms = triton.testing.do_bench(call)
            print(
                f"8192³ in bf16, groups of {group}: ≈{2 * 8192**3 / ms / 1e9:.0f} TFLOP/s",
                end=", ",
            )
            print(f"≈{100 * torch_ms / ms:.0f}% of torch, which calls cuBLAS")


if __name__ == "__main__":
    main()
