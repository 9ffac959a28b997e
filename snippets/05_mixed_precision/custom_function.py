"""A custom autograd.Function raises an error in backward under autocast; two decorators fix it.

The message is "expected m1 and m2 to have the same dtype". Autocast casts the operators inside
forward, but the function saves its own inputs, which are fp32. backward runs outside autocast
and multiplies a bf16 gradient by an fp32 tensor.

Look at the types: SameState computes in bf16, which is the type of the region, and Always32
computes in fp32.
"""

import torch
from torch.amp import custom_bwd, custom_fwd

LOW = torch.bfloat16
FOUND = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if FOUND else torch.device("cpu")
KIND = DEVICE.type


class Plain(torch.autograd.Function):
    """y = x wᵀ with a handwritten backward: [b, i], [o, i] -> [b, o]."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class SameState(Plain):
    """Backward runs under the autocast state that forward had."""

    forward = staticmethod(custom_fwd(Plain.forward, device_type=KIND))
    backward = staticmethod(custom_bwd(Plain.backward, device_type=KIND))


class Always32(Plain):
    """Inputs are cast to fp32, and autocast is off inside, for a kernel that needs fp32."""

    forward = staticmethod(
        custom_fwd(Plain.forward, device_type=KIND, cast_inputs=torch.float32)
    )
    backward = staticmethod(custom_bwd(Plain.backward, device_type=KIND))


@torch.library.custom_op("book::outer_product", mutates_args=())
def outer_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A custom operator, such as a wrapped kernel, that requires equal types."""
    if x.dtype != w.dtype:
        raise TypeError(f"outer_product got {x.dtype} and {w.dtype}")
    return x[:, :, None] * w[None]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    w = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    ((x @ w.t()).square().sum()).backward()
    exact = x.grad, w.grad
    for function in (Plain, SameState, Always32):
        x.grad = w.grad = None
        with torch.autocast(KIND, LOW):
            y = function.apply(x, w)
            low = x @ w.t()
        try:
            y.float().square().sum().backward()
            if function is SameState:  # forward and backward are products in bf16
                assert torch.equal(y, low) and torch.equal(w.grad, w.grad.to(LOW).float())
            rtol, atol = (0.02, 0.2) if y.dtype == LOW else (1e-5, 1e-4)
            torch.testing.assert_close((x.grad, w.grad), exact, rtol=rtol, atol=atol)
            print(f"{function.__name__}: output {y.dtype}, gradient {w.grad.dtype}")
        except RuntimeError as error:
            print(f"{function.__name__}: {type(error).__name__}: {error}")

    with torch.autocast(KIND, LOW):
        low = x @ w.t()  # [4, 6], bf16
        try:
            torch.ops.book.outer_product(low, w)
        except TypeError as error:
            print(f"custom_op: {type(error).__name__}: {error}")
    torch.library.register_autocast("book::outer_product", KIND, LOW)
    with torch.autocast(KIND, LOW):
        registered = torch.ops.book.outer_product(low, w)
    assert registered.dtype == LOW
    torch.testing.assert_close(registered, torch.einsum("bo,oi->boi", low, w.to(LOW)))
    print(f"custom_op, registered: {registered.dtype}")
    print(f"  outside autocast:    {torch.ops.book.outer_product(x, w.t()).dtype}")


if __name__ == "__main__":
    main()
