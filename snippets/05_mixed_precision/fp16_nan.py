"""In fp16, attention scores above 65,504 become NaN, and RMSNorm silently returns zeros.

In both cases all inputs are finite, but an intermediate result is too large for fp16. For each
case the program shows a correct version. bf16 has the range of fp32, so the wrong versions work
in bf16. Look at the column "fp16".
"""

import torch
from torch import nn

SEQUENCE, WIDTH = 64, 128


def scores_then_scale(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return attention weights [s, s]. The product is √width times the input of softmax."""
    return ((q @ k.T) / WIDTH**0.5).softmax(-1)


def scale_then_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the same weights, but divide the queries before the product."""
    return ((q / WIDTH**0.5) @ k.T).softmax(-1)


def library(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the weights of torch's attention, with the identity matrix as the values."""
    values = torch.eye(SEQUENCE, dtype=q.dtype)
    return nn.functional.scaled_dot_product_attention(q[None], k[None], values[None])[0]


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    """Compute every intermediate result in the dtype of x."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def rms_norm_fp32(x: torch.Tensor) -> torch.Tensor:
    """Compute in fp32, and round only the result."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def describe(x: torch.Tensor) -> str:
    if x.isnan().any():
        return f"NaN in {x.isnan().double().mean().item():.0%}"
    return "all zero" if not x.any() else f"≈{x.float().square().mean().sqrt().item():.3f}"


def check() -> None:
    """Compare all versions with a formula or with torch, in float64, without an overflow."""
    q, k = torch.randn(SEQUENCE, WIDTH), torch.randn(SEQUENCE, WIDTH)
    exact = torch.einsum("iw,jw->ij", q.double(), k.double()).div(WIDTH**0.5).softmax(-1)
    for f in (scores_then_scale, scale_then_scores, library):
        torch.testing.assert_close(f(q, k), exact.float())
    exact = nn.functional.rms_norm(q.double(), (WIDTH,), eps=1e-6)
    for f in (rms_norm, rms_norm_fp32):
        torch.testing.assert_close(f(q), exact.float())
    for dtype in (torch.float16, torch.bfloat16):  # only rms_norm_fp32 computes in fp32
        low = q.to(dtype), k.to(dtype)
        scores = (scores_then_scale, low), (scale_then_scores, low)
        for f, given in (*scores, (rms_norm, low[:1])):
            assert not f(*given).equal(f(*(t.float() for t in given)).to(dtype)), f
        assert rms_norm_fp32(low[0]).equal(rms_norm_fp32(low[0].float()).to(dtype))


def main() -> None:
    check()
    generator = torch.Generator().manual_seed(0)
    q = 30 * torch.randn(SEQUENCE, WIDTH, generator=generator)
    x = 300 * torch.randn(8, WIDTH, generator=generator)
    largest = (q @ q.T).max().item()
    print(f"|q| up to ≈{q.abs().max().item():.0f}, q·k up to ≈{largest:.0f}, fp16 up to 65504")
    print("                              fp16           bf16     fp32")
    for name, run in (
        ("scores, then scale", lambda d: scores_then_scale(q.to(d), q.to(d))),
        ("scale, then scores", lambda d: scale_then_scores(q.to(d), q.to(d))),
        ("scaled_dot_product_attention", lambda d: library(q.to(d), q.to(d))),
        ("RMSNorm in its own type", lambda d: rms_norm(x.to(d))),
        ("RMSNorm, fp32 inside", lambda d: rms_norm_fp32(x.to(d))),
    ):
        dtypes = torch.float16, torch.bfloat16, torch.float32
        results = [run(dtype) for dtype in dtypes]
        assert tuple(result.dtype for result in results) == dtypes
        cells = [describe(result) for result in results]
        print(f"{name:28}  {cells[0]:13}  {cells[1]:7}  {cells[2]}")
    nan = scores_then_scale(q.half(), q.half())
    assert nan.isnan().any() and not rms_norm(x.half()).any()
    fixed = scale_then_scores(q.half(), q.half())
    torch.testing.assert_close(fixed, scores_then_scale(q, q).half(), atol=1e-3, rtol=1e-3)
    larger = 3 * q.half()  # the scores are 9 times as large, and the division is not enough
    assert scale_then_scores(larger, larger).isnan().any()
    fixed = rms_norm_fp32(x.half())
    torch.testing.assert_close(fixed, rms_norm(x).half(), atol=1e-3, rtol=2e-3)


if __name__ == "__main__":
    main()
