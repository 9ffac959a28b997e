"""BatchNorm uses the statistics of a micro-batch, so its gradients depend on their number.

The gradient of a mean loss does not depend on how the batch is cut, if the output of a sample
depends only on this sample. With BatchNorm it depends on the whole micro-batch. With a layer
norm it does not. No error is raised.
"""

import copy

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, HIDDEN = 32, 16


def gradient(model: nn.Module, batch: torch.Tensor, target: torch.Tensor, m: int):
    """The gradient accumulated over m micro-batches, as in a pipeline, and the model."""
    model = copy.deepcopy(model)
    for x, y in zip(batch.chunk(m), target.chunk(m), strict=True):
        (mse_loss(model(x), y) / m).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), model


def main() -> None:
    torch.manual_seed(0)
    batch, target = torch.randn(2, BATCH, HIDDEN)
    for norm in (nn.BatchNorm1d, nn.LayerNorm):
        layers = nn.Linear(HIDDEN, HIDDEN), norm(HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)
        model = nn.Sequential(*layers)
        whole = copy.deepcopy(model)
        mse_loss(whole(batch), target).backward()
        true = torch.cat([p.grad.flatten() for p in whole.parameters()])
        print(norm.__name__)
        for m in (2, 8, 16):
            ours, trained = gradient(model, batch, target, m)
            error = ((ours - true).norm() / true.norm()).item()
            shown = f"{error:.1%} off" if error > 1e-5 else "equal"
            moved = getattr(trained[1], "num_batches_tracked", None)
            updates = f", running statistics moved {moved} times" if moved is not None else ""
            print(f"  m = {m:2}, {BATCH // m:2} samples each: gradient {shown}{updates}")


if __name__ == "__main__":
    main()
