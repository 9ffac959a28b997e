"""An fp32 layer gets a gradient with the error of bf16 if its backward runs under autocast.

Autocast changes every operator that runs while it is on, and the products of backward are
operators too. There are two ways into this error. The first way is a call of backward() inside
the region. The second way is torch.compile: it compiles backward under the autocast state in
which forward was called, and it ignores regions inside the compiled function.

Look at the errors. The .grad is fp32 in all rows, so its type does not show the difference.
"""

import warnings

import torch
import torch._functorch.config
import torch.nn.functional as F
from torch import nn

warnings.filterwarnings("ignore", message=".*torch.jit.*")  # some releases import it here
FOUND = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if FOUND else torch.device("cpu")
KIND, LOW, H = DEVICE.type, torch.bfloat16, 256


def make() -> tuple[nn.Linear, torch.Tensor]:
    """The layer that must stay exact, and its input [64, h]."""
    torch.manual_seed(0)
    return nn.Linear(H, H).to(DEVICE), torch.randn(64, H, device=DEVICE)


def island(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """The loss of a layer that is exempt from autocast."""
    with torch.autocast(KIND, enabled=False):
        return F.mse_loss(layer(x), torch.ones_like(x))


def gradient(inside: bool, compiled: bool = False) -> tuple[torch.Tensor, float]:
    """Return the layer's gradient and the loss; backward() is inside or after the region."""
    layer, x = make()
    function = torch.compile(island, backend="aot_eager") if compiled else island
    with torch.autocast(KIND, LOW):
        assert (x @ x.t()).dtype == LOW
        loss = function(layer, x)
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return layer.weight.grad, loss.item()


def compiled_with_region() -> tuple[torch.Tensor, float]:
    """The region is inside the compiled function, so autocast is off where it is called."""
    layer, x = make()

    def region(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(KIND, LOW):
            return island(layer, x)

    loss = torch.compile(region, backend="aot_eager")(layer, x)
    loss.backward()
    return layer.weight.grad, loss.item()


def main() -> None:
    layer, x = make()
    right = F.mse_loss(layer.double()(x.double()), torch.ones_like(x).double())
    right.backward()
    exact = layer.weight.grad
    rows = [
        ("inside the region", False, gradient(inside=True)),
        ("after its end", True, gradient(inside=False)),
        ("after its end, compiled", False, gradient(inside=False, compiled=True)),
        ("after its end, region compiled too", True, compiled_with_region()),
    ]
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        torch.compiler.reset()
        rows.append(("after its end, compiled, fix", True, gradient(False, compiled=True)))
    for where, good, (off, loss) in rows:
        error = ((off.double() - exact).norm() / exact.norm()).item()
        print(f"backward {where:34} .grad is {off.dtype}, its error ≈{error:.0e}")
        assert 5e-8 < error < 1e-6 if good else 1e-3 < error < 1e-2
        assert abs(loss / right.item() - 1) < 1e-6  # forward is exact in all rows


if __name__ == "__main__":
    main()
