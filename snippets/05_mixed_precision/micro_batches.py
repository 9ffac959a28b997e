"""Gradients added up over micro-batches in a bf16 .grad, and in fp32: the error of the sum.

backward adds to .grad in the precision of .grad, which is that of the parameter. With a bf16
model each micro-batch is rounded into the sum; the cure is a sum in fp32 beside it.
"""

import torch

H, SAMPLES, MICRO_BATCHES = 64, 16, 256
SHOWN = (1, 4, 16, 64, 256)


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Of a layer with this weight, in the weight's precision. x: [samples, h]"""
    return (torch.tanh(x.to(weight.dtype) @ weight.T) - 1).square().mean()


def distance(total: torch.Tensor, exact: torch.Tensor) -> float:
    return ((total.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    torch.manual_seed(0)
    weight = (torch.randn(H, H) / H**0.5).bfloat16().requires_grad_()
    truth = weight.detach().double().requires_grad_()
    wide = torch.zeros(H, H)  # the fp32 sum of the same bf16 gradients
    exact = torch.zeros(H, H, dtype=torch.float64)  # and their sum without rounding
    print("micro-batches   bf16 .grad   fp32 sum   both against float64 throughout")
    for m in range(1, MICRO_BATCHES + 1):
        x = torch.randn(SAMPLES, H).bfloat16()
        loss(truth, x).backward()
        loss(weight, x).backward()  # weight.grad += …, in bf16
        (alone,) = torch.autograd.grad(loss(weight, x), weight)
        wide += alone
        exact += alone.double()
        if m in SHOWN:
            sums = [distance(t, exact) for t in (weight.grad, wide)]
            whole = [distance(t, truth.grad) for t in (weight.grad, wide)]
            print(
                f"{m:13}   ≈{sums[0]:<9.1e}    ≈{sums[1]:<7.0e}   "
                f"≈{whole[0]:.1e} and ≈{whole[1]:.1e}"
            )
    assert weight.grad.dtype == torch.bfloat16
    assert sums[0] > 5e-3 and sums[1] < 1e-6 and whole[0] > 2 * whole[1]


if __name__ == "__main__":
    main()
