"""One call of an operator runs several kernels, which the dispatcher chooses by their keys.

The program registers an operator with one kernel for each of four keys. Each kernel adds its
key to a list, so the list shows the path of a call. Look at the order: autocast runs before
autograd, and autograd runs before the kernel that computes. At the end the program prints which
kinds of kernels the dispatcher found for three operators of PyTorch.
"""

import torch
from torch.library import Library

stops = []
library = Library("tour", "DEF")
library.define("double(Tensor x) -> Tensor")


# --8<-- [start:kernels]
def cpu(x: torch.Tensor) -> torch.Tensor:  # computes the numbers
    stops.append("CPU")
    return x * 2


def meta(x: torch.Tensor) -> torch.Tensor:  # computes only the shape
    stops.append("Meta")
    return x.new_empty(x.shape)


def autocast(x: torch.Tensor) -> torch.Tensor:  # casts, then calls the operator again
    stops.append("AutocastCPU")
    with torch.autocast("cpu", enabled=False):  # otherwise this kernel would run again
        return torch.ops.tour.double(x.bfloat16())


# --8<-- [end:kernels]
# --8<-- [start:autograd]
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():  # removes the key of this kernel
            return torch.ops.tour.double(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        stops.append(f"backward gets {str(grad.dtype).removeprefix('torch.')}")
        return grad * 2


def autograd(x: torch.Tensor) -> torch.Tensor:  # records the backward if it is needed
    stops.append("Autograd")
    return Double.apply(x)


KERNELS = {"CPU": cpu, "Meta": meta, "AutocastCPU": autocast, "Autograd": autograd}
for key, kernel in KERNELS.items():
    library.impl("double", kernel, key)
# --8<-- [end:autograd]


def call(what: str, x: torch.Tensor, *keys: str) -> torch.Tensor:
    """Call the operator, check that it ran the kernels of `keys` in this order, print them."""
    stops.clear()
    y = torch.ops.tour.double(x)
    assert stops == list(keys), stops
    assert y.shape == x.shape and (y.is_meta or torch.equal(y.float(), x + x))
    recorded = "a backward is recorded" if y.requires_grad else "nothing is recorded"
    print(f"{what:24} {' → '.join(stops):30} {recorded}")
    return y


def table(operator: str, keys: list[str]) -> None:
    """Print for each key which kind of kernel the dispatcher would run for this operator."""
    rows = {}
    for line in torch._C._dispatch_dump_table(operator).splitlines():
        key, _, entry = line.partition(":")
        rows[key] = entry[entry.rindex("[") + 1 : entry.rindex("]")] if "[" in entry else "none"
    print(operator)
    for key in keys:
        print(f"  {key:16} {rows[key]}")


def main() -> None:
    x = torch.ones(3)
    print(f"keys of a tensor: {torch._C._dispatch_keys(x)}")
    leaf = x.clone().requires_grad_()
    y = call("requires_grad", leaf, "Autograd", "CPU")
    (grad,) = torch.autograd.grad(y, leaf, torch.arange(3.0))
    assert grad.tolist() == [0, 2, 4]
    with torch.autocast("cpu", torch.bfloat16):
        y = call("the same under autocast", leaf, "AutocastCPU", "Autograd", "CPU")
        assert y.dtype == torch.bfloat16
    stops.clear()
    (grad,) = torch.autograd.grad(y, leaf, torch.arange(3.0).bfloat16())
    assert stops == ["backward gets bfloat16"]  # autograd saw the tensor after the cast
    assert grad.dtype == torch.float32 and grad.tolist() == [0, 2, 4]
    print(f"{'its backward':24} {stops[0]}, and the leaf gets float32")
    with torch.no_grad():
        y = call("the same under no_grad", leaf, "Autograd", "CPU")
        assert not y.requires_grad  # the kernel for autograd ran and recorded nothing
    y = call("without requires_grad", x, "Autograd", "CPU")
    assert not y.requires_grad
    with torch.inference_mode():
        assert not call("in inference mode", leaf, "CPU").requires_grad
    call("device='meta'", torch.ones(3, device="meta"), "Autograd", "Meta")
    try:
        torch.ops.tour.double(torch.ones(3).to_sparse())
    except NotImplementedError as error:
        print(f"{'sparse':24} NotImplementedError: {str(error).split('.')[0]}…")
    else:
        raise AssertionError("expected an error: no kernel is registered for SparseCPU")

    for operator in ["aten::add.Tensor", "aten::linear", "aten::ones_like"]:
        table(operator, ["CPU", "SparseCPU", "AutogradCPU"])


if __name__ == "__main__":
    main()
