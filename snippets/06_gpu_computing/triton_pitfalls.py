"""Common mistakes in Triton kernels, made on purpose: most of them raise no error.

All kernels run in Triton's interpreter, which does not report an access outside of a tensor
either. Each output is a part of a larger buffer that is filled with -1, so the program can
count the elements that a kernel writes behind its output. The last lines show messages of
Triton for mistakes that do raise an error.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = (i < n) | (not MASKED)
    tl.store(out_ptr + i, 2 * tl.load(x_ptr + i, mask=mask), mask=mask)


@triton.jit
def softmax_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, FILL: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=FILL)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(out_ptr + i, e / tl.sum(e, axis=0), mask=i < n)


@triton.jit
def offset_kernel(out_ptr, row, stride):
    tl.store(out_ptr, row * stride)  # both factors are int32, so the product is int32, too
    tl.store(out_ptr + 1, row.to(tl.int64) * stride)


@triton.jit
def length_kernel(out_ptr, n):
    tl.store(out_ptr + tl.arange(0, n), 0)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    at = SIZE * i[:, None] + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


os.environ["TRITON_INTERPRET"] = "0"


@triton.jit
def early(x):  # like tl.max, if triton was imported before the variable was set
    return 2 * x


os.environ["TRITON_INTERPRET"] = "1"


@triton.jit
def late_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, early(tl.load(x_ptr)))


def product_error(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error of dot_kernel's product, relative to the largest element."""
    out = torch.empty_like(a)
    dot_kernel[(1,)](a, b, out, SIZE=len(a))
    return ((out - exact).abs().max() / exact.abs().max()).item()


def as_tf32(x: torch.Tensor) -> torch.Tensor:
    """x with 10 instead of 23 bits of mantissa. The other bits are cut off."""
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def refused(launch) -> str:
    """The message of the error that this launch raises."""
    try:
        launch()
    except Exception as error:
        cause = error.__cause__ or error
        return f"{type(cause).__name__}: {cause}"
    raise AssertionError("expected an error")


def main() -> None:
    x, buffer = torch.arange(16.0), torch.full((16,), -1.0)
    out = buffer[:10]
    for masked in (False, True):
        buffer.fill_(-1)
        double_kernel[(2,)](x, out, 10, BLOCK=8, MASKED=masked)
        behind = int((buffer[10:] != -1).sum())
        assert behind == (0 if masked else 6)
        print(f"10 elements, 2 blocks of 8, mask {masked}: {behind} elements behind changed")

    every_other = x[::2]
    double_kernel[(1,)](every_other, out, 8, BLOCK=8, MASKED=True)
    assert torch.equal(out[:8], 2 * x[:8])  # the neighbors in memory, not in the view
    print(f"twice {every_other[:4].tolist()}, from a strided view: {out[:4].tolist()}")
    double_kernel[(1,)](every_other.contiguous(), out, 8, BLOCK=8, MASKED=True)
    assert torch.equal(out[:8], 2 * every_other)
    print(f"the same from its contiguous copy: {out[:4].tolist()}")

    scores = torch.full((5,), -3.0)
    for fill in (0.0, -float("inf")):
        softmax_kernel[(1,)](scores, out, 5, BLOCK=8, FILL=fill)
        right = torch.allclose(out[:5], scores.softmax(0))
        assert right == (fill != 0)
        print(f"softmax with masked elements read as {fill}: sum {out[:5].sum():.4f}")
    softmax_kernel[(1,)](scores - 200, out, 5, BLOCK=8, FILL=-float("inf"))
    torch.testing.assert_close(out[:5], scores.softmax(0))  # 0 / 0 without the maximum

    offsets = torch.empty(2, dtype=torch.int64)
    offset_kernel[(1,)](offsets, 50_000, 50_257)
    assert offsets.tolist() == [50_000 * 50_257 - 2**32, 50_000 * 50_257]
    print(f"row 50,000 of 50,257 columns begins at {offsets[0]:,}; in int64 {offsets[1]:,}")

    torch.manual_seed(0)
    a, b = torch.randn(2, 32, 32).unbind()
    exact = (a.double() @ b.double()).float()
    error = product_error(a, b, exact)
    error_tf32 = product_error(as_tf32(a), as_tf32(b), exact)
    assert error < 1e-6 and 100 * error < error_tf32 < 2**-9
    print(f"error of an fp32 product: ≈{error:.0e} here, ≈{error_tf32:.0e} with tf32 inputs")

    print("BLOCK=10:", refused(lambda: double_kernel[(1,)](x, out, 10, BLOCK=10, MASKED=True)))
    print("n:", refused(lambda: length_kernel[(1,)](out, 8)))
    message = refused(lambda: late_kernel[(1,)](x, out))
    assert message.startswith("RuntimeError: Cannot call @triton.jit'd outside of the scope")
    print("TRITON_INTERPRET set too late:", message)


if __name__ == "__main__":
    main()
