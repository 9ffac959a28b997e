"""A bf16 .grad loses precision with every micro-batch, and grad_dtype keeps the sum in fp32.

backward adds to .grad in the type of .grad, which by default is the type of the parameter. In
a bf16 model each addition rounds the whole sum to bf16. With grad_dtype=torch.float32 the sum
is fp32. torch's SGD accepts such a gradient, and its Adam raises an error.

Compare the last two columns: with more micro-batches the bf16 sum becomes worse, and the fp32
sum becomes better.
"""

import torch

H, SAMPLES, MICRO_BATCHES = 64, 16, 256
SHOWN = (1, 4, 16, 64, 256)


def loss(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The loss of a layer with this weight, computed in its type. x: [samples, h]"""
    return (torch.tanh(x.to(weight.dtype) @ weight.T) - 1).square().mean()


def distance(total: torch.Tensor, exact: torch.Tensor) -> float:
    return ((total.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small: a second thread would only wait
    torch.manual_seed(0)
    # --8<-- [start:weights]
    weight = (torch.randn(H, H) / H**0.5).bfloat16().requires_grad_()
    truth = weight.detach().double().requires_grad_()
    wide = weight.detach().clone().requires_grad_()
    wide.grad_dtype = torch.float32  # the weight stays bf16, its gradients are added in fp32
    # --8<-- [end:weights]
    exact = torch.zeros(H, H, dtype=torch.float64)  # the sum of the same gradients, unrounded
    print("micro-batches   bf16 .grad   fp32 .grad   both against float64 throughout")
    errors = []
    for m in range(1, MICRO_BATCHES + 1):
        x = torch.randn(SAMPLES, H).bfloat16()
        # --8<-- [start:backward]
        loss(truth, x).backward()
        loss(weight, x).backward()  # weight.grad += …, in bf16
        loss(wide, x).backward()  # the same gradient, added in fp32
        # --8<-- [end:backward]
        (alone,) = torch.autograd.grad(loss(weight, x), weight)
        exact += alone.double()
        if m in SHOWN:
            sums = [distance(t, exact) for t in (weight.grad, wide.grad)]
            whole = [distance(t, truth.grad) for t in (weight.grad, wide.grad)]
            errors.append(whole)
            print(
                f"{m:13}   ≈{sums[0]:<9.1e}    ≈{sums[1]:<9.0e}   "
                f"≈{whole[0]:.1e} and ≈{whole[1]:.1e}"
            )
    types = [t.grad.dtype for t in (weight, wide, truth)]
    assert types == [torch.bfloat16, torch.float32, torch.float64]
    assert sums[0] > 5e-3 and sums[1] < 1e-6 and whole[0] > 2 * whole[1]
    assert errors[0][0] == errors[0][1] > 1e-3  # after one micro-batch there is no sum yet
    assert whole[0] > 2 * errors[0][0] and whole[1] < errors[0][1] / 1.5  # bf16 grew, fp32 fell

    print("a step with the fp32 .grad of a bf16 weight")
    for kind in (torch.optim.SGD, torch.optim.Adam):
        expected = (wide.detach().float() - 0.1 * wide.grad).bfloat16()
        try:
            kind([wide], lr=0.1).step()
            torch.testing.assert_close(wide.detach(), expected)
            print(f"  {kind.__name__}: taken")
        except RuntimeError as error:
            print(f"  {kind.__name__}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
