"""A CUDA graph in small: record the operators of a step, and replay them on the same memory.

The recording stores each operator with the tensors that it used. A replay runs the list again,
without the Python of the model, without autograd and without allocations. A replay does not see
what was not an operator: a new input tensor, a Python number, or an `if`.
"""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


# --8<-- [start:graph]
class Graph(TorchDispatchMode):
    """Records the operators inside a `with` block, and runs them again in `replay()`."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("a value is needed on the host: not permitted while capturing")
        result = func(*args, **(kwargs or {}))
        self.nodes.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """Run every operator again, and copy each new result to the recorded address."""
        with torch.no_grad():
            for func, args, kwargs, result in self.nodes:
                fresh, _ = tree_flatten(func(*args, **kwargs))
                for old, new in zip(tree_flatten(result)[0], fresh, strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)  # a CUDA kernel writes to the old address


# --8<-- [end:graph]


def build() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(12, 4, 8)  # [steps, b, h]
    return model, x, x.sum(-1, keepdim=True)


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
    """One step of SGD; returns the loss."""
    loss = nn.functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(rate * gradient)
    return loss


def eager(rates: list[float]) -> list[float]:
    model, xs, ys = build()
    return [step(model, x, y, r).item() for x, y, r in zip(xs, ys, rates, strict=True)]


# --8<-- [start:train]
def replayed(rates: list[float], copy: bool) -> tuple[list[float], Graph]:
    """Capture one step, replay the others. `copy` puts each batch into the static input."""
    model, xs, ys = build()
    static_x, static_y = xs[0].clone(), ys[0].clone()
    with Graph() as graph:
        loss = step(model, static_x, static_y, rates[0])
    losses = [loss.item()]
    for x, y in zip(xs[1:], ys[1:], strict=True):
        if copy:
            static_x.copy_(x)
            static_y.copy_(y)
        else:
            static_x, static_y = x, y  # the graph still reads the old tensors
        graph.replay()
        losses.append(loss.item())
    return losses, graph


# --8<-- [end:train]


def equal(a: list[float], b: list[float]) -> str:
    same = [abs(p - q) < 1e-5 for p, q in zip(a, b, strict=True)]
    return "equal in all 12 steps" if all(same) else f"equal up to step {same.index(False)}"


def main() -> None:
    torch.set_num_threads(1)
    constant, falling = [0.05] * 12, [0.05 if i < 6 else 0.0005 for i in range(12)]
    right = eager(constant)
    losses, graph = replayed(constant, copy=True)
    print(f"{len(graph.nodes)} operators captured")
    print(f"inputs copied into the static ones: {equal(losses, right)}")
    assert equal(losses, right).endswith("12 steps")

    stale, _ = replayed(constant, copy=False)
    print(f"inputs replaced by new tensors: {equal(stale, right)}")
    print(f"  last loss {right[-1]:.4f} eager, {stale[-1]:.4f} replayed: batch 0, twelve times")
    frozen, _ = replayed(falling, copy=True)
    print(f"learning rate lowered after 6 steps: {equal(frozen, eager(falling))}")
    print(f"  {equal(frozen, losses)} to the run that never lowered it")

    model, xs, ys = build()
    try:
        with Graph():
            if step(model, xs[0], ys[0], 0.05).item() > 1e3:
                print("diverged")
    except RuntimeError as error:
        print(f"an .item() while capturing: {error}")


if __name__ == "__main__":
    main()
