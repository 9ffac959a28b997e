"""Softmax in Triton: one program keeps a whole row on the chip, and reads and writes it once.

Five separate operators (max, subtract, exp, sum, divide) would move the row eight times: five
reads and three writes. The block may be longer than the row. Its masked elements are read as
minus infinity, so they change neither the maximum nor the sum.
"""

import contextlib
import inspect
import os
import re

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(x_ptr, out_ptr, x_stride, out_stride, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # row * stride may exceed 2^31
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + i, mask=i < columns, other=-float("inf"))
    x = x.to(tl.float32)
    numerator = tl.exp(x - tl.max(x, axis=0))
    y = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * out_stride + i, y, mask=i < columns)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x [rows, columns]. Each row must be contiguous."""
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError("softmax needs a matrix whose rows are contiguous")
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
        below = x - 200  # a masked element that is read as 0 would now be the maximum
        torch.testing.assert_close(softmax(below), below.double().softmax(-1).float())
        half = (x / 30).half()
        exact = half.double().softmax(-1).half()  # the kernel may differ by one step of fp16
        torch.testing.assert_close(softmax(half), exact, rtol=1e-3, atol=1e-7)
        block = triton.next_power_of_2(columns)
        longer = torch.full((5, columns + block), -1.0, device=device)
        softmax_kernel[(5,)](x, longer, x.stride(0), longer.stride(0), columns, BLOCK=block)
        torch.testing.assert_close(longer[:, :columns], expected)
        assert torch.all(longer[:, columns:] == -1)  # the kernel writes nothing behind a row
        print(
            f"{columns:5} columns in a block of {block:4}, {columns / block:4.0%} used: equal"
        )
    source = inspect.getsource(softmax_kernel.fn)
    moves = re.findall(r"\b(?:for|while|load|store)\b|(?<![.\w])\w+(?=\()", source)
    assert moves == ["softmax_kernel", "load", "float", "store"]  # no loop, no other function
    with contextlib.suppress(ValueError):
        softmax(x.T)
        raise AssertionError("softmax accepted rows that are not contiguous")
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
