"""One operator of one's own, whole: kernel, fake kernel, backward; checked, and compiled.

The kernels are NumPy, which torch can no more look into than into C++ or CUDA. What torch needs
to know is therefore said aloud: the schema, the shapes, the formula of the gradient.
"""

import torch
from torch import Tensor
from torch.library import custom_op, opcheck


# --8<-- [start:op]
@custom_op("book::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x / rms(x) · weight over the last dimension: [..., h], [h] -> [..., h], [..., 1]."""
    a, w = x.detach().numpy(), weight.detach().numpy()
    inverse = 1 / ((a * a).mean(-1, keepdims=True) + eps) ** 0.5  # [..., 1]
    y = torch.from_numpy(a * inverse * w).contiguous()
    return y, torch.from_numpy(inverse).contiguous()


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)


@custom_op("book::rms_norm_backward", mutates_args=(), device_types="cpu")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x [..., h] and of weight [h]."""
    g, a, w, r = (t.detach().numpy() for t in (grad, x, weight, inverse))
    gw = g * w
    dx = r * gw - a * r**3 * (gw * a).mean(-1, keepdims=True)
    dw = (g * a * r).reshape(-1, w.size).sum(0)
    return torch.from_numpy(dx).contiguous(), torch.from_numpy(dw)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def setup_context(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])  # kept for backward, not meant to be used


def backward(ctx, grad_y: Tensor, _) -> tuple[Tensor, Tensor, None]:
    return *rms_norm_backward(grad_y, *ctx.saved_tensors), None


rms_norm.register_autograd(backward, setup_context=setup_context)
# --8<-- [end:op]


def block(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.silu(rms_norm(x, weight, 1e-6)[0])


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, dtype=torch.float64, requires_grad=True)

    print("schema:", rms_norm._opoverload._schema)
    for small in (x, x / 1000):  # where the squares are near 1e-6, eps counts
        y, inverse = rms_norm(small, weight, 1e-6)
        torch.testing.assert_close(y, torch.nn.functional.rms_norm(small, (33,), weight, 1e-6))
    assert not inverse.requires_grad
    print("forward equal to torch.nn.functional.rms_norm")
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6)[0], (x, weight))
    print("gradcheck: the gradients are those of finite differences")

    strided = torch.randn(33, 4, dtype=torch.float64).T.requires_grad_()  # [4, 33]
    for test, verdict in opcheck(rms_norm, (strided, weight, 1e-6)).items():
        print(f"opcheck: {test:32} {verdict}")
    saved = strided.detach(), weight.detach(), rms_norm(strided, weight, 1e-6)[1].detach()
    opcheck(rms_norm_backward, (torch.randn_like(strided), *saved))  # transposed, all of them

    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(block, fullgraph=True, backend=backend)
    gradients = []
    for function in (block, compiled):
        loss = function(x, weight).square().sum()
        gradients.append(torch.autograd.grad(loss, (x, weight)))
    torch.testing.assert_close(*gradients)
    print("compiled with fullgraph=True, one graph:", " → ".join(graphs[0]))
    print("its gradients equal to the eager ones")


if __name__ == "__main__":
    main()
