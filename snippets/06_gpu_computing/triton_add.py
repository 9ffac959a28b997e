"""Vector addition in Triton: each program adds one block, and a mask cuts the last block.

If there is no GPU, Triton's interpreter runs the kernel with NumPy, one program after the
other. The variable TRITON_INTERPRET must be set before triton is imported.
"""

import contextlib
import os

import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # BLOCK indices, not one
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside)
    y = tl.load(y_ptr + i, mask=inside)
    tl.store(out_ptr + i, x + y, mask=inside)


def add(x: torch.Tensor, y: torch.Tensor, block: int) -> torch.Tensor:
    """x + y for contiguous tensors of the same shape. `block` must be a power of two.

    The kernel computes indices in 32 bits, so the tensors must have fewer than 2^31 elements.
    """
    if not (x.is_contiguous() and y.is_contiguous() and x.shape == y.shape):
        raise ValueError("add needs two contiguous tensors of the same shape")
    out = torch.empty_like(x)
    add_kernel[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def main() -> None:
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    block = 256
    for n in (1, 31, 33, 1000, 4097):
        x, y = torch.randn(2, n, device=device).unbind()
        assert torch.equal(add(x, y, block), (x.double() + y.double()).float())
        programs = triton.cdiv(n, block)
        masked = programs * block - n
        longer = torch.full((n + block,), -1.0, device=device)
        add_kernel[(programs,)](x, y, longer, n, BLOCK=block)
        assert torch.equal(longer[:n], x + y) and torch.all(longer[n:] == -1)  # not written
        print(f"{n:5} elements: {programs:2} programs, {masked:3} masked in the last, equal")
    with contextlib.suppress(ValueError):
        add(x[::2], y[::2], block)
        raise AssertionError("add accepted tensors that are not contiguous")
    if on_gpu:
        x, y = torch.randn(2, 2**26, device=device).unbind()
        out = torch.empty_like(x)
        copy_ms = triton.testing.do_bench(lambda: out.copy_(x))  # 8 bytes an element
        add_ms = triton.testing.do_bench(lambda: add(x, y, block=1024))  # 12 bytes
        print(f"add ≈{12 * x.numel() / add_ms / 1e6:.0f} GB/s", end=", ")
        print(f"≈{100 * (12 / add_ms) / (8 / copy_ms):.0f}% of a copy's bytes per second")


if __name__ == "__main__":
    main()
