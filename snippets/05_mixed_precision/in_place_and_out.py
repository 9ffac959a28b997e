"""index_add_(): self (Float) and source (BFloat16) must have the same scalar type, and its kin.

Autocast chooses types for what an operator returns. Where you hand in the tensor to write to,
there is nothing to choose: in-place operators and out= run as they are, or fail. What survives
the region's end keeps its 16 bits, and meets fp32 outside.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

FOUND = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if FOUND else torch.device("cpu")


def attempt(title: str, action: Callable[[], torch.Tensor], exact: object = None) -> None:
    """Print the type of its result, which is `exact` but for rounding, or its error's begin."""
    try:
        result = action()
    except RuntimeError as error:
        print(f"  {title:34} RuntimeError: {str(error).splitlines()[0]}")
        return
    torch.testing.assert_close(result.float(), exact, rtol=0.02, atol=0.1)
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
        attempt("zeros += y", lambda: zeros.add_(y), 2 * square)
        attempt("y += x, fp32 added into bf16", lambda: y.add_(x), square + x)
        attempt("zeros.index_add_(0, rows, y)", lambda: zeros.index_add_(0, rows, y))
        attempt("zeros.scatter_add_(0, …, y)", lambda: zeros.scatter_add_(0, places, y))
        attempt("zeros[rows] = y", lambda: zeros.index_put_((rows,), y))
        attempt(
            "  fix: y.to(zeros.dtype)",
            lambda: zeros.index_add_(0, rows, y.to(zeros.dtype)),
            3 * square + x,
        )
    print("after its end")
    attempt("y + x, promoted", lambda: y + x, square + 2 * x)
    attempt("layer(y), an fp32 layer", lambda: layer(y))
    attempt("  fix: layer(y.float())", lambda: layer(y.float()), layer(square + x))
    attempt("mse_loss(y, x)", lambda: F.mse_loss(y, x), square.square().mean())
    attempt("mse_loss(y, y), in bf16", lambda: F.mse_loss(y, y), square.new_zeros(()))


if __name__ == "__main__":
    main()
