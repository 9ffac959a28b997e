"""A Triton kernel as an operator: triton_op keeps it visible to torch.compile; with gradient.

On a machine without a GPU the kernel runs in Triton's interpreter, in eager mode. What compiles
is the difference to custom_op: the body is traced, down to the kernel; no fake kernel needed.
"""

import os

import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import triton
import triton.language as tl
from torch.library import triton_op, wrap_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


# --8<-- [start:kernel]
@triton.jit
def silu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, x / (1 + tl.exp(-x)), mask=mask)


@triton_op("book::triton_silu", mutates_args={})
def silu(x: torch.Tensor) -> torch.Tensor:
    """x·sigmoid(x), element by element; any shape, any strides."""
    x = x.contiguous()  # the kernel counts elements from the pointer on
    y = torch.empty_like(x)
    n = x.numel()
    kernel = silu_kernel if INTERPRETED else wrap_triton(silu_kernel)
    kernel[(triton.cdiv(n, 128),)](x, y, n, BLOCK=128)
    return y


# --8<-- [end:kernel]
def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


silu.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def main() -> None:
    device = torch.device("cpu" if INTERPRETED else torch.accelerator.current_accelerator())
    torch.manual_seed(0)
    matrix = torch.randn(33, 258, device=device)
    for x in [matrix[0, 0], matrix[0, :31], matrix.T, matrix[:5, :129], matrix[:, ::2]]:
        x = x.detach().requires_grad_()  # the last three have strides, two of them gaps
        y, reference = silu(x), torch.nn.functional.silu(x)
        torch.testing.assert_close(y, reference)
        above = torch.randn_like(y)  # another gradient at each element
        ours, theirs = (torch.autograd.grad(out, x, above)[0] for out in (y, reference))
        torch.testing.assert_close(ours, theirs)
    print("equal to torch.nn.functional.silu, forward and backward, whatever the strides")
    if not INTERPRETED:  # the interpreter cannot be traced
        x = torch.randn(1000, device=device)
        compiled = torch.compile(lambda x: silu(2 * x) + 1, fullgraph=True)
        torch.testing.assert_close(compiled(x), torch.nn.functional.silu(2 * x) + 1)


if __name__ == "__main__":
    main()
