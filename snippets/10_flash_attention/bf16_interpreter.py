"""This program shows that Triton's interpreter multiplies bf16 tiles as whole numbers.

It stores bf16 as 16-bit integers, and tl.dot passes these integers to NumPy. A product of fp16
tiles is right. Converting bf16 to fp32 first is exact, and the kernels of this chapter do so in
the interpreter. The last line shows that a sum of two bf16 tiles is wrong as well.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"
import torch
import triton
import triton.language as tl


# --8<-- [start:kernel]
@triton.jit
def product_kernel(a_ptr, b_ptr, c_ptr, WIDEN: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    tl.store(c_ptr + at, tl.dot(a, b))


# --8<-- [end:kernel]
@triton.jit
def sum_kernel(a_ptr, c_ptr):
    i = tl.arange(0, 16)
    a = tl.load(a_ptr + i)
    tl.store(c_ptr + i, a + a)


def main() -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-2, 3, (16, 16)) for _ in "ab")
    expected = (a.double() @ b.double()).float()
    for kind, widen in (
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        c = torch.zeros(16, 16)
        scale = 2**20 if widen else 1  # bf16 can represent this number, and fp16 cannot
        product_kernel[(1,)]((scale * a).to(kind), b.to(kind), c, WIDEN=widen)
        error = (c / scale - expected).abs().max().item()
        name = str(kind).removeprefix("torch.") + (", widened" if widen else "")
        print(f"{name:17}  largest error {f'≈{error:.0e}' if error else 'none'}")
        right = widen or kind == torch.float16
        assert error == 0 if right else error > 1e9  # the bits, read as integers
    for kind in (torch.float16, torch.bfloat16):
        a = torch.arange(1, 17).to(kind)
        c = torch.zeros_like(a)
        sum_kernel[(1,)](a, c)
        wrong = (c != 2 * a).sum().item()
        assert wrong == (16 if kind == torch.bfloat16 else 0)
    print(f"bfloat16, a + a    {wrong} of 16 sums are wrong")


if __name__ == "__main__":
    main()
