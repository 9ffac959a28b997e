"""backward() inside the region: an fp32 island gets its gradients in bf16, and nobody says so.

Autocast works on whatever runs while it is on, and the products of backward are operators too.
"""

import torch
import torch.nn.functional as F
from torch import nn

FOUND = torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator() if FOUND else torch.device("cpu")
KIND, LOW, H = DEVICE.type, torch.bfloat16, 256


def gradient(inside: bool) -> tuple[torch.Tensor, float]:
    """The gradient of an fp32 layer, backward() inside the region or after; its loss."""
    torch.manual_seed(0)
    layer, x = nn.Linear(H, H).to(DEVICE), torch.randn(64, H, device=DEVICE)
    with torch.autocast(KIND, LOW):
        assert (x @ x.t()).dtype == LOW
        with torch.autocast(KIND, enabled=False):  # the island: this layer must be exact
            loss = F.mse_loss(layer(x), torch.ones_like(x))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return layer.weight.grad, loss.item()


def main() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(H, H).to(DEVICE), torch.randn(64, H, device=DEVICE)
    right = F.mse_loss(layer.double()(x.double()), torch.ones_like(x).double())
    right.backward()
    exact = layer.weight.grad
    for inside in (True, False):
        off, loss = gradient(inside)
        error = ((off.double() - exact).norm() / exact.norm()).item()
        where = "inside the region" if inside else "after its end"
        print(f"backward {where:18} .grad is {off.dtype}, its error ≈{error:.0e}")
        assert 1e-3 < error < 1e-2 if inside else 5e-8 < error < 1e-6
        assert abs(loss / right.item() - 1) < 1e-6  # forward is exact in both


if __name__ == "__main__":
    main()
