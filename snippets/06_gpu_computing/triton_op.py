"""triton_op makes an operator from a Triton kernel, and torch.compile can trace into it.

An operator that is made with custom_op is opaque to the compiler. With triton_op, the compiler
traces the body down to the launch of the kernel, so the operator needs no fake kernel. If there
is no GPU, the kernel runs in Triton's interpreter, and only in eager mode.
"""

import os
from unittest import mock

import torch

if not torch.accelerator.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # triton reads it when it is imported

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
    """Return x · sigmoid(x) for each element of a tensor of any shape and any strides."""
    x = x.contiguous()  # the kernel reads consecutive elements, beginning at the pointer
    y = torch.empty_like(x)
    n = x.numel()
    kernel = silu_kernel if INTERPRETED else wrap_triton(silu_kernel)
    with torch.accelerator.device_index(x.device.index):  # does nothing for a CPU tensor
        kernel[(triton.cdiv(n, 128),)](x, y, n, BLOCK=128)
    return y


# --8<-- [end:kernel]
@triton.jit
def copy_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask), mask=mask)


def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    s = x.sigmoid()
    return grad * s * (1 + x * (1 - s))


silu.register_autograd(
    backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def compare(device: str) -> None:
    """Compare `silu` and its gradient with torch on `device`, which need not be current."""
    torch.manual_seed(0)
    matrix = torch.randn(33, 258, device=device)
    for x in [matrix[0, 0], matrix[0, :31], matrix.T, matrix[:5, :129], matrix[:, ::2]]:
        x = x.detach().requires_grad_()  # the last three inputs are not contiguous
        y, reference = silu(x), torch.nn.functional.silu(x)
        torch.testing.assert_close(y, reference)
        above = torch.randn_like(y)  # a different incoming gradient for each element
        ours, theirs = (torch.autograd.grad(out, x, above)[0] for out in (y, reference))
        torch.testing.assert_close(ours, theirs)
    with mock.patch.dict(globals(), silu_kernel=copy_kernel):  # does the kernel compute y?
        assert torch.equal(silu(matrix[0]), matrix[0])
    if not INTERPRETED:  # the compiler cannot trace the interpreter
        x = torch.randn(1000, device=device)
        compiled = torch.compile(lambda x: silu(2 * x) + 1, fullgraph=True)
        torch.testing.assert_close(compiled(x), torch.nn.functional.silu(2 * x) + 1)


def main() -> None:
    if INTERPRETED:
        compare("cpu")
    else:
        kind = torch.accelerator.current_accelerator().type
        for index in range(torch.accelerator.device_count()):  # the first one stays current
            compare(f"{kind}:{index}")
    print("equal to torch.nn.functional.silu, forward and backward, whatever the strides")


if __name__ == "__main__":
    main()
