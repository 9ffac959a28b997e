"""This program makes one differentiable function of the two kernel programs and tests it.

Start it with the two kernel programs as arguments. Forward saves q, k, v, the output and the
log-sum-exp, and nothing of size s². The backward kernels use what the forward kernel has
stored, so a log-sum-exp in the wrong base would show here, and so would a gradient with strides
of 0. The output compares the gradients of a small layer with those of plain bf16 attention.
"""

import importlib.util
import os
import sys
from itertools import pairwise

import torch

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton  # noqa: F401  (both programs need it)


def load(path: str):
    spec = importlib.util.spec_from_file_location(path.removesuffix(".py"), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --8<-- [start:function]
class FlashAttention(torch.autograd.Function):
    """Packed q [tokens, heads, d], k and v [tokens, kv_heads, d]; sequences begin at starts."""

    kernels = None  # the two programs, as modules

    @staticmethod
    def forward(ctx, q, k, v, starts, causal, block):
        o, lse = FlashAttention.kernels[0].attention(q, k, v, starts, causal, block=block)
        ctx.save_for_backward(q, k, v, o, lse, starts)
        ctx.causal, ctx.block = causal, block
        return o

    @staticmethod
    def backward(ctx, do):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("FlashAttention has no second derivative")
        q, k, v, o, lse, starts = ctx.saved_tensors
        do = do.contiguous()  # the gradient of a sum is one number with strides of 0
        gradients = FlashAttention.kernels[1].backward(
            q, k, v, o, lse, do, starts, ctx.causal, block=ctx.block
        )
        return *gradients, None, None, None


# --8<-- [end:function]


def plain(q, k, v, starts, causal, block):
    """Attention by its definition, one sequence at a time, in the arguments' precision."""
    outs = []
    for a, b in pairwise(starts.tolist()):
        group = q.shape[1] // k.shape[1]
        x = q[a:b].transpose(0, 1)
        y, w = (t[a:b].repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
        z = x @ y.mT * q.shape[-1] ** -0.5
        hidden = torch.ones(b - a, b - a, dtype=torch.bool, device=q.device).triu(1)
        outs.append(
            (z.masked_fill(hidden & causal, -torch.inf).softmax(-1) @ w).transpose(0, 1)
        )
    return torch.cat(outs)


def layer(attention, x, weights, starts, heads, kv_heads, d):
    """Return the output of attention and all gradients: projections, attention, a sum."""
    x, *weights = leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    q, k, v = (
        (x @ w).view(len(x), n, d)
        for w, n in zip(weights, (heads, kv_heads, kv_heads), strict=True)
    )
    o = attention(q, k, v, starts, True, (16, 16))
    return o, torch.autograd.grad(o.sum(), leaves, retain_graph=True)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("start it as: python triton_autograd.py triton_forward.py triton_backward.py")
    torch.set_num_threads(1)
    FlashAttention.kernels = [load(path) for path in sys.argv[1:]]
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    heads, kv_heads, d, width = 4, 2, 16, 32
    starts = torch.tensor([0, 1, 22, 40], dtype=torch.int32, device=device)
    x = torch.randn(40, width, device=device, dtype=torch.bfloat16)
    weights = [
        (torch.randn(width, n * d, device=device) * width**-0.5).bfloat16()
        for n in (heads, kv_heads, kv_heads)
    ]
    shape = (starts, heads, kv_heads, d)
    wide = [w.double() for w in weights]
    _, truth = layer(plain, x.double(), wide, *shape)
    _, rounded = layer(plain, x, weights, *shape)
    o, ours = layer(FlashAttention.apply, x, weights, *shape)
    print("relative error of the gradient: ours, and that of plain bf16 attention")
    for name, gradient, exact, plainly in zip(
        ("x", "W_q", "W_k", "W_v"), ours, truth, rounded, strict=True
    ):
        error, yardstick = ((t - exact).norm() / exact.norm() for t in (gradient, plainly))
        assert error <= 2 * yardstick + 1e-3, (name, error, yardstick)
        print(f"{name:3}   ≈{error:.3f}   ≈{yardstick:.3f}")
    q, k, v = (torch.randn(40, 1, 16, device=device).requires_grad_() for _ in range(3))
    out = FlashAttention.apply(q, k, v, starts, True, (16, 16))
    for loss in (out.square().sum(), out.sum()):  # once_differentiable accepts the second one
        try:
            torch.autograd.grad(loss, q, create_graph=True)
        except RuntimeError as error:
            assert "no second derivative" in str(error)
        else:
            raise AssertionError("create_graph=True leads to a wrong second derivative")
    saved = sum(t.nbytes for t in o.grad_fn.saved_tensors) - starts.nbytes
    tokens = len(x)
    expected = 2 * tokens * d * (2 * heads + 2 * kv_heads) + 4 * heads * tokens
    assert saved == expected
    print(
        f"saved for backward: {saved:,} bytes: q, k, v, the output and a number for each query"
    )


if __name__ == "__main__":
    main()
