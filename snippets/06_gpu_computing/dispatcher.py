"""One call passes several kernels: the dispatcher's keys, its table, and who computes at last.

An operator of our own with a kernel per key notes every stop. Then the table of a real one,
computed by the dispatcher from what was registered.
"""

import torch
from torch.library import Library

stops = []
library = Library("tour", "DEF")
library.define("double(Tensor x) -> Tensor")


# --8<-- [start:tour]
def cpu(x: torch.Tensor) -> torch.Tensor:
    stops.append("CPU: computes")
    return x * 2


def meta(x: torch.Tensor) -> torch.Tensor:
    stops.append("Meta: shape only")
    return x.new_empty(x.shape)


def autocast(x: torch.Tensor) -> torch.Tensor:
    stops.append("AutocastCPU: casts")
    with torch.autocast("cpu", enabled=False):
        return torch.ops.tour.double(x.bfloat16())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tour.double(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def autograd(x: torch.Tensor) -> torch.Tensor:
    stops.append("Autograd: records")
    return Double.apply(x)


KERNELS = {"CPU": cpu, "Meta": meta, "AutocastCPU": autocast, "Autograd": autograd}
for key, kernel in KERNELS.items():
    library.impl("double", kernel, key)
# --8<-- [end:tour]


def call(what: str, x: torch.Tensor, *keys: str) -> torch.Tensor:
    """Call the operator; its stops must be those of `keys`, in this order."""
    stops.clear()
    y = torch.ops.tour.double(x)
    assert [stop.split(":")[0] for stop in stops] == list(keys), stops
    assert y.shape == x.shape and (y.is_meta or torch.equal(y.float(), x + x))
    print(f"{what:24} {' → '.join(stops)}")
    return y


def table(operator: str, keys: list[str]) -> None:
    """For some keys, what kind of kernel the dispatcher's computed table holds."""
    rows = {}
    for line in torch._C._dispatch_dump_table(operator).splitlines():
        key, _, entry = line.partition(":")
        rows[key] = entry[entry.rindex("[") + 1 : entry.rindex("]")] if "[" in entry else "none"
    print(operator)
    for key in keys:
        print(f"  {key:16} {rows[key]}")


def main() -> None:
    x = torch.ones(3)
    with torch.inference_mode():
        call("in inference mode", torch.ones(3), "CPU")
    leaf = x.clone().requires_grad_()
    y = call("requires_grad", leaf, "Autograd", "CPU")
    (grad,) = torch.autograd.grad(y, leaf, torch.arange(3.0))
    assert grad.tolist() == [0, 2, 4]
    with torch.autocast("cpu", torch.bfloat16):
        z = x.clone().requires_grad_()
        y = call("and under autocast", z, "AutocastCPU", "Autograd", "CPU")
        assert y.dtype == torch.bfloat16
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
