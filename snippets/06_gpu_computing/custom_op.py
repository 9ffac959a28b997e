"""A custom operator that trains and compiles needs a kernel, a fake kernel and a backward.

The kernels are written in NumPy. PyTorch cannot look into them, as it cannot look into C++ or
CUDA. The program therefore states the schema, the shapes of the results, and the gradient. Then
it checks all three. Look at the last three lines of the output: each compiled graph contains
the custom operator as one node.
"""

from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.library import custom_op, opcheck


# --8<-- [start:forward]
@custom_op("book::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) · weight [..., h] and 1 / rms(x) [..., 1] for x [..., h]."""
    a, w = x.detach().numpy(), weight.detach().numpy()
    inverse = 1 / ((a * a).mean(-1, keepdims=True) + eps) ** 0.5  # [..., 1]
    y = torch.from_numpy(a * inverse * w).contiguous()
    return y, torch.from_numpy(inverse).contiguous()


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)


# --8<-- [end:forward]
# --8<-- [start:backward]
@custom_op("book::rms_norm_backward", mutates_args=(), device_types="cpu")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x [..., h] and of weight [h]."""
    g, a, w, r = (t.detach().numpy() for t in (grad, x, weight, inverse))
    gw = g * w
    dx = r * gw - a * r**3 * (gw * a).mean(-1, keepdims=True)
    dw = (g * a * r).reshape(-1, w.size).sum(0)
    return torch.from_numpy(dx).contiguous(), torch.from_numpy(dw)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


# --8<-- [end:backward]
# --8<-- [start:autograd]
def setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])  # only the backward uses it


def backward(ctx, grad_y: Tensor, _) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad_y, *ctx.saved_tensors), None


rms_norm.register_autograd(backward, setup_context=setup_context)
# --8<-- [end:autograd]


def block(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.silu(rms_norm(x, weight, 1e-6)[0])


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, dtype=torch.float64, requires_grad=True)

    print("schema:", rms_norm._opoverload._schema)
    strided = torch.randn(33, 4, dtype=torch.float64).T.requires_grad_()  # [4, 33]
    for sample in (x, x / 1000, strided):  # eps matters if the squares are near 1e-6
        y, inverse = rms_norm(sample, weight, 1e-6)
        reference = torch.nn.functional.rms_norm(sample, (33,), weight, 1e-6)
        torch.testing.assert_close(y, reference)
        above = torch.randn_like(y)  # a different incoming gradient for each element
        ours, theirs = (torch.autograd.grad(z, (sample, weight), above) for z in (y, reference))
        torch.testing.assert_close(ours, theirs)
    assert not inverse.requires_grad
    print("equal to torch.nn.functional.rms_norm, forward and backward, also if transposed")
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6)[0], (x, weight))
    print("gradcheck: the gradients agree with finite differences")

    for test, verdict in opcheck(rms_norm, (strided, weight, 1e-6)).items():
        print(f"opcheck: {test:32} {verdict}")
    saved = strided.detach(), weight.detach(), rms_norm(strided, weight, 1e-6)[1].detach()
    opcheck(rms_norm_backward, (torch.randn_like(strided), *saved))  # transposed inputs

    graphs = {}

    def recorder(direction: str) -> Callable:
        def compiler(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
            calls = [node for node in graph.graph.nodes if node.op == "call_function"]
            graphs[direction] = [node.name for node in calls if "getitem" not in node.name]
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=recorder("forward"), bw_compiler=recorder("backward"))
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    gradients = []
    for function in (block, compiled):
        loss = function(x, weight).square().sum()
        gradients.append(torch.autograd.grad(loss, (x, weight)))
    torch.testing.assert_close(*gradients)
    for direction, calls in graphs.items():
        print(f"compiled {direction}, one graph: {' → '.join(calls)}")
    print("the gradients of the compiled function equal the eager gradients")


if __name__ == "__main__":
    main()
