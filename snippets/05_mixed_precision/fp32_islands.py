"""Softmax, norms and losses, computed entirely in 16 bits, and with fp32 inside.

The inputs are rounded to 16 bits first, and the reference is float64 on these inputs. So the
errors come from the computation alone. "fp32 inside" means that inputs and outputs have 16
bits, and that everything between them is fp32. Look at the row "LayerNorm, mean 8". The lines
below the table show the errors of torch's own functions on bf16 inputs, and a gradient that
torch's cross-entropy loses on a CPU.
"""

from collections.abc import Callable

import torch
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]
ROWS, N = 64, 4096


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in pairs, and round to x's dtype after each addition."""
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x


def softmax(x: torch.Tensor) -> torch.Tensor:
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / total(e)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * (total(x * x) / N + 1e-6).rsqrt()


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    """Normalize with the one-pass formula: variance = mean of squares - square of mean."""
    mean = total(x) / N
    return (x - mean) * (total(x * x) / N - mean * mean + 1e-5).rsqrt()


def cross_entropy(x: torch.Tensor) -> torch.Tensor:
    """Return the loss for class 0, [rows, n] -> [rows, 1]."""
    top = x.amax(-1, keepdim=True)
    return total((x - top).exp()).log() + top - x[:, :1]


def error(f: Function, x: torch.Tensor, dtype: torch.dtype, inside: bool) -> float:
    """Return the error of f in `dtype`, or of f with fp32 inside, relative to float64."""
    exact = f(x.to(dtype).double())
    ours = f(x.to(dtype).float()).to(dtype) if inside else f(x.to(dtype))
    return ((ours.double() - exact).norm() / exact.norm()).item()


def check() -> None:
    """Compare the functions above with torch's functions, in float64."""
    x, library = torch.randn(ROWS, N, dtype=torch.float64), nn.functional
    torch.testing.assert_close(softmax(x), library.softmax(x, -1))
    torch.testing.assert_close(rms_norm(x), library.rms_norm(x, (N,), eps=1e-6))
    torch.testing.assert_close(layer_norm(x), library.layer_norm(x, (N,), eps=1e-5))
    right = torch.zeros(ROWS, dtype=torch.long)
    losses = library.cross_entropy(x, right, reduction="none")
    torch.testing.assert_close(cross_entropy(x).squeeze(-1), losses)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
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
        "mean": (lambda t: t.mean(-1), x + 8),
        "softmax": (lambda t: nn.functional.softmax(t, -1), 10 * x),
        "rms_norm": (lambda t: nn.functional.rms_norm(t, (N,)), x),
        "layer_norm, mean 8": (lambda t: nn.functional.layer_norm(t, (N,)), x + 8),
    }
    print("torch's functions on bf16, whose error is that of one rounding:")
    for name, (f, inputs) in library.items():
        off = error(f, inputs, torch.bfloat16, inside=False)
        assert 1e-3 < off < 2**-8  # half a step of bf16
        low = inputs.bfloat16()
        assert (
            f(low) != f(low.float()).bfloat16()
        ).float().mean() < 0.02  # only the result is rounded
        print(f"  {name:18} ≈{off:.1e}")

    scores = torch.randn(ROWS, N, generator=generator)
    scores[:, 0] = scores.amax(-1) + 15  # the model is right and nearly certain
    right = torch.zeros(ROWS, dtype=torch.long)
    print("torch's cross_entropy of bf16 on a CPU, mean gradient of the right class:")
    for name, dtype in (("as it is", torch.bfloat16), ("float() first", torch.float32)):
        logits = scores.bfloat16().requires_grad_()
        exact = logits.detach().double().softmax(-1)[:, 0] - 1
        nn.functional.cross_entropy(logits.to(dtype), right, reduction="sum").backward()
        print(f"  {name:14} {f'≈{logits.grad[:, 0].float().mean().item():.1e}':>9}")
        lost = (logits.grad[:, 0].double() - exact).abs() / exact.abs()
        assert (lost < 0.5).all() if dtype == torch.float32 else (lost == 1).all()


if __name__ == "__main__":
    main()
