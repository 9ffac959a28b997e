"""Triton's silent mistakes, made on purpose, and what its compiler refuses.

All of it runs in the interpreter, which reports no access outside a tensor either. Every output
lies in a larger buffer of -1, so that what a kernel writes behind its output can be seen.
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
    tl.store(out_ptr, row * stride)  # both are int32, and so is the product
    tl.store(out_ptr + 1, row.to(tl.int64) * stride)


@triton.jit
def length_kernel(out_ptr, n):
    tl.store(out_ptr + tl.arange(0, n), 0)


def refused(launch) -> str:
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
        print(f"10 elements, 2 blocks of 8, mask {masked}: {behind} written behind the end")

    every_other = x[::2]
    double_kernel[(1,)](every_other, out, 8, BLOCK=8, MASKED=True)
    assert torch.equal(out[:8], 2 * x[:8])  # the neighbours in memory, not in the view
    print(f"twice {every_other[:4].tolist()} of a strided view: {out[:4].tolist()}")
    double_kernel[(1,)](every_other.contiguous(), out, 8, BLOCK=8, MASKED=True)
    assert torch.equal(out[:8], 2 * every_other)
    print(f"of its contiguous copy: {out[:4].tolist()}")

    scores = torch.full((5,), -3.0)
    for fill in (0.0, -float("inf")):
        softmax_kernel[(1,)](scores, out, 5, BLOCK=8, FILL=fill)
        right = torch.allclose(out[:5], scores.softmax(0))
        assert right == (fill != 0)
        print(f"softmax with masked elements read as {fill}: sum {out[:5].sum():.4f}")
    softmax_kernel[(1,)](scores - 200, out, 5, BLOCK=8, FILL=-float("inf"))
    torch.testing.assert_close(out[:5], scores.softmax(0))  # without the maximum 0 / 0

    offsets = torch.empty(2, dtype=torch.int64)
    offset_kernel[(1,)](offsets, 50_000, 50_257)
    assert offsets.tolist() == [50_000 * 50_257 - 2**32, 50_000 * 50_257]
    print(f"row 50,000 of 50,257 columns begins at {offsets[0]:,}; in int64 {offsets[1]:,}")

    print("BLOCK=10:", refused(lambda: double_kernel[(1,)](x, out, 10, BLOCK=10, MASKED=True)))
    print("n:", refused(lambda: length_kernel[(1,)](out, 8)))


if __name__ == "__main__":
    main()
