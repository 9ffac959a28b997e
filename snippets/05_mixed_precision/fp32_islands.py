"""Softmax, norms, losses: each computed in 16 bits throughout, and with fp32 inside.

Inputs are rounded to bf16 first, and the truth is float64 on those inputs: what is measured is
the computation alone. "inside" means that bf16 goes in and comes out, fp32 is in between. Then
torch's own functions on bf16: which have fp32 inside, and which lose a gradient for want of it.
"""

from collections.abc import Callable

import torch
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]
ROWS, N = 64, 4096


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, in pairs, rounded to x's precision after each addition."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / total(e)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * (total(x * x) / N + 1e-6).rsqrt()


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """By the one-pass formula, variance = mean of squares - square of mean."""
    mean = total(x) / N
    return (x - mean) * (total(x * x) / N - mean * mean + 1e-5).rsqrt()


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    """Of class 0, [rows, n] -> [rows, 1]."""
    top = x.amax(-1, keepdim=True)
    return total((x - top).exp()).log() + top - x[:, :1]


def error(f: Function, x: torch.Tensor, dtype: torch.dtype, inside: bool) -> float:
    """Relative error of f in `dtype`, or of f with fp32 inside, against float64."""
    exact = f(x.to(dtype).double())
    ours = f(x.to(dtype).float()).to(dtype) if inside else f(x.to(dtype))
    return ((ours.double() - exact).norm() / exact.norm()).item()


def check() -> None:
    """In float64 these are torch's functions."""
    x, library = torch.randn(ROWS, N, dtype=torch.float64), nn.functional
    torch.testing.assert_close(softmax(x), library.softmax(x, -1))
    torch.testing.assert_close(rms_norm(x), library.rms_norm(x, (N,), eps=1e-6))
    torch.testing.assert_close(layer_norm(x), library.layer_norm(x, (N,), eps=1e-5))
    right = torch.zeros(ROWS, dtype=torch.long)
    losses = library.cross_entropy(x, right, reduction="none")
    torch.testing.assert_close(cross_entropy(x).squeeze(-1), losses)


def main() -> None:
    check()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, N, generator=generator)
    tasks: dict[str, tuple[Function, torch.Tensor]] = {
        "softmax, scores of ±30": (softmax, 10 * x),
        "RMSNorm": (rms_norm, x),
        "LayerNorm, mean 0": (layer_norm, x),
        "LayerNorm, mean 8": (layer_norm, x + 8),
        "cross-entropy": (cross_entropy, 3 * x),
    }
    print("relative error          bf16   fp32 inside       fp16   fp32 inside")
    for name, (f, inputs) in tasks.items():
        cells = []
        for dtype in (torch.bfloat16, torch.float16):
            plain, inside = (error(f, inputs, dtype, kind) for kind in (False, True))
            assert inside < 2 * torch.finfo(dtype).eps and not plain < inside
            cells.append(f"≈{plain:.1e}   ≈{inside:.1e}  ")
        print(f"{name:22} " + "   ".join(cells).rstrip())
    library: dict[str, tuple[Function, torch.Tensor]] = {
        "softmax": (lambda t: nn.functional.softmax(t, -1), 10 * x),
        "layer_norm, mean 8": (lambda t: nn.functional.layer_norm(t, (N,)), x + 8),
    }
    for name, (f, inputs) in library.items():
        off = error(f, inputs, torch.bfloat16, inside=False)
        assert 1e-3 < off < 4e-3  # rounded once, on its way out
        print(f"torch's own {name} of bf16: ≈{off:.1e}, so it has fp32 inside")

    scores = torch.randn(ROWS, N, generator=generator)
    scores[:, 0] = scores.amax(-1) + 15  # the model is right, and nearly sure of it
    right = torch.zeros(ROWS, dtype=torch.long)
    print("torch's own cross_entropy of bf16, gradient of the right class, mean:")
    for name, dtype in (("as it is", torch.bfloat16), ("float() first", torch.float32)):
        logits = scores.bfloat16().requires_grad_()
        nn.functional.cross_entropy(logits.to(dtype), right, reduction="sum").backward()
        print(f"  {name:14} {f'≈{logits.grad[:, 0].float().mean().item():.1e}':>9}")
    assert logits.grad[:, 0].ne(0).all()


if __name__ == "__main__":
    main()
