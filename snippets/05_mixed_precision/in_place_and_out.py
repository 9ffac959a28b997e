"""Autocast does not cast for in-place operators or out=. Some calls work, others raise errors.

The most frequent message is "index_add_(): self (Float) and source (BFloat16) must have the
same scalar type". Autocast chooses the type of a result that an operator creates. If you pass
the tensor into which the operator writes, the type is already fixed.

Look at the type in each row, and at the last rows: a loss of two bf16 tensors raises no error,
but its result has only about three digits.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

FOUND = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if FOUND else torch.device("cpu")


def attempt(title: str, action: Callable[[], torch.Tensor], exact: object = None) -> None:
    """Print the type of the result, or the first line of the error.

    A result in fp32 must equal `exact` up to the rounding of fp32. A result in bf16 must not.
    """
    try:
        result = action()
    except RuntimeError as error:
        print(f"  {title:34} RuntimeError: {str(error).splitlines()[0]}")
        return
    torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.1)
    equal = torch.allclose(result.float(), exact, rtol=1e-5, atol=1e-5)
    assert equal == (result.dtype is torch.float32), title
    print(f"  {title:34} {result.dtype}")


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 4, device=DEVICE)
    rows = torch.arange(4, device=DEVICE)
    places = rows.expand(4, 4)
    layer = nn.Linear(4, 4).to(DEVICE)
    square = x @ x
    print("inside a region; x is fp32, y = x @ x is bf16")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        y = x @ x
        zeros = torch.zeros_like(x)
        attempt("addmm(zeros, x, x)", lambda: torch.addmm(zeros, x, x), square)
        attempt("zeros.addmm_(x, x), not cast", lambda: zeros.addmm_(x, x), square)
        attempt("zeros.addmm_(y, x)", lambda: zeros.addmm_(y, x))
        attempt("mm(x, x, out=zeros), not cast", lambda: torch.mm(x, x, out=zeros), square)
        attempt("mm(y, x, out=zeros)", lambda: torch.mm(y, x, out=zeros))
        attempt("zeros += y", lambda: zeros.add_(y), square + y.float())
        attempt("y += x, fp32 added into bf16", lambda: y.add_(x), square + x)
        attempt("zeros.index_add_(0, rows, y)", lambda: zeros.index_add_(0, rows, y))
        attempt("zeros.scatter_add_(0, …, y)", lambda: zeros.scatter_add_(0, places, y))
        attempt("zeros[rows] = y", lambda: zeros.index_put_((rows,), y))
        attempt(
            "  fix: y.to(zeros.dtype)",
            lambda: zeros.index_add_(0, rows, y.to(zeros.dtype)),
            zeros + y.float(),
        )
    print("after the region")
    attempt("y + x, promoted", lambda: y + x, y.float() + x)
    attempt("layer(y), an fp32 layer", lambda: layer(y))
    attempt(
        "  fix: layer(y.float())",
        lambda: layer(y.float()),
        y.float() @ layer.weight.T + layer.bias,
    )
    attempt(
        "mse_loss(y, x), promoted", lambda: F.mse_loss(y, x), (y.float() - x).square().mean()
    )
    a, b = torch.randn(2, 65_536, device=DEVICE).bfloat16()
    attempt("mse_loss(a, b), both bf16", lambda: F.mse_loss(a, b), (a - b).float().var())
    exact = (a.double() - b.double()).square().mean()
    errors = []
    for name, pair in (
        ("mse_loss(a, b)", (a, b)),
        ("a.float(), b.float()", map(torch.Tensor.float, (a, b))),
    ):
        errors.append((F.mse_loss(*pair).double() / exact - 1).abs().item())
        print(f"    {name:32} relative error ≈{errors[-1]:.0e}")
    assert 1e-4 < errors[0] < 2**-7  # a running sum in bf16 would stop at 256 of 65,536 terms
    assert errors[1] < 1e-6


if __name__ == "__main__":
    main()
