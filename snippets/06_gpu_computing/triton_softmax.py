"""Softmax of rows in Triton: one program holds a whole row, reads it once and writes it once.

PyTorch's operators one by one (max, subtract, exp, sum, divide) would move the row eight times
through memory. Masked lanes are filled with minus infinity, whose exponential is zero.
"""

import contextlib
import os

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, x_stride, out_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may pass 2^31
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + i, mask=i < columns, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * out_stride + i, y, mask=i < columns)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x [rows, columns]; columns must lie side by side."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError("softmax takes a matrix whose rows are contiguous")
    rows, columns = x.shape
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(columns)
    warps = 4 if block <= 2048 else 8
    softmax_kernel[(rows,)](
        x, out, x.stride(0), out.stride(0), columns, BLOCK=block, num_warps=warps
    )
    return out


def main() -> None:
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    for columns in (1, 31, 33, 1000, 4097):
        x = 30 * torch.randn(5, columns, device=device)
        expected = x.double().softmax(-1).float()
        torch.testing.assert_close(softmax(x), expected)
        torch.testing.assert_close(softmax(x[::2]), expected[::2])  # a stride between rows
        below = x - 200  # far below 0, where a masked element read as 0 would be the largest
        torch.testing.assert_close(softmax(below), below.double().softmax(-1).float())
        half = (x / 30).half()
        exact = half.double().softmax(-1).half()  # and ours within one step of fp16
        torch.testing.assert_close(softmax(half), exact, rtol=1e-3, atol=1e-7)
        block = triton.next_power_of_2(columns)
        print(
            f"{columns:5} columns in a block of {block:4}, {columns / block:4.0%} used: equal"
        )
    with contextlib.suppress(ValueError):
        softmax(x.T)
        raise AssertionError("columns that do not lie side by side were let through")
    large = torch.tensor([[1000.0, 999.0, -1000.0]], device=device)
    print("scores of 1000:", [f"{p:.4f}" for p in softmax(large)[0].tolist()])
    if on_gpu:
        x = torch.randn(16384, 4096, device=device)
        out = torch.empty_like(x)
        copy_ms = triton.testing.do_bench(lambda: out.copy_(x))
        for name, run in (("ours", softmax), ("torch", lambda x: x.softmax(-1))):
            ms = triton.testing.do_bench(lambda run=run: run(x))
            print(f"{name}: ≈{100 * copy_ms / ms:.0f}% of a copy's speed")


if __name__ == "__main__":
    main()
