"""Gradients added up over micro-batches in a bf16 .grad, and in fp32: the error of the sum.

backward adds to .grad in the precision of .grad, which is that of the parameter. With a bf16
model each micro-batch is rounded into the sum; the cure is a sum in fp32 beside it.
"""

import copy

import torch
from torch import nn

H, SAMPLES, MICRO_BATCHES = 64, 16, 256
SHOWN = (1, 4, 16, 64, 256)


def distance(total: torch.Tensor, exact: torch.Tensor) -> float:
    return ((total.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H)).bfloat16()
    weight, truth = model[2].weight, copy.deepcopy(model).double()
    wide = torch.zeros(H, H)  # the sum in fp32 of bf16 gradients
    exact = torch.zeros(H, H, dtype=torch.float64)  # of the same bf16 gradients
    print("micro-batches   bf16 .grad   fp32 sum   both against float64 throughout")
    for m in range(1, MICRO_BATCHES + 1):
        x = torch.randn(SAMPLES, H).bfloat16()
        before = weight.grad.clone() if m > 1 else torch.zeros_like(weight)
        (model(x) - 1).float().square().mean().backward()
        (truth(x.double()) - 1).square().mean().backward()
        alone = copy.deepcopy(model)  # the gradient of this micro-batch, unrounded by the sum
        alone.zero_grad()
        (alone(x) - 1).float().square().mean().backward()
        assert torch.equal(weight.grad, before + alone[2].weight.grad)
        wide += alone[2].weight.grad
        exact += alone[2].weight.grad.double()
        if m in SHOWN:
            sums = [distance(t, exact) for t in (weight.grad, wide)]
            whole = [distance(t, truth[2].weight.grad) for t in (weight.grad, wide)]
            print(
                f"{m:13}   ≈{sums[0]:<9.1e}    ≈{sums[1]:<7.0e}   "
                f"≈{whole[0]:.1e} and ≈{whole[1]:.1e}"
            )
    assert sums[0] > 5e-3 and sums[1] < 1e-6 and whole[0] > 2 * whole[1]


if __name__ == "__main__":
    main()
