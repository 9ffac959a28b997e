"""Layer norm in Triton, forward and backward, compared with float64.

With x̂ = (x - mean) / σ and g = dy · w, the gradient of a row is
(g - mean(g) - x̂ mean(g x̂)) / σ. The gradients of weight and bias are sums over all rows. Each
program adds up every P-th row in registers, and one small sum over the P programs finishes the
gradients. The order of the additions is the same in every run.
"""

import os

import torch
from torch.autograd.function import once_differentiable

if not torch.accelerator.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
import triton
import triton.language as tl


@triton.jit
def forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, h, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < h
    x = tl.load(x_ptr + row * h + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / h
    centred = tl.where(inside, x - mean, 0.0)  # not -mean where masked
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, axis=0) / h + eps)
    w = tl.load(w_ptr + i, mask=inside, other=0.0)
    b = tl.load(b_ptr + i, mask=inside, other=0.0)
    tl.store(y_ptr + row * h + i, centred * rstd * w + b, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def backward_kernel(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, rows, h,
    BLOCK: tl.constexpr,
):  # fmt: skip
    stripe = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < h
    w = tl.load(w_ptr + i, mask=inside, other=0.0)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    db = tl.zeros((BLOCK,), dtype=tl.float32)
    # --8<-- [start:rows]
    row = stripe.to(tl.int64)  # row * h may exceed 2^31
    while row < rows:
        at = row * h + i
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        g = dy * w
        along = tl.sum(g * normal, axis=0) / h
        dx = (g - tl.sum(g, axis=0) / h - normal * along) * rstd
        tl.store(dx_ptr + at, dx, mask=inside)
        dw += dy * normal
        db += dy
        row += tl.num_programs(0)
    # --8<-- [end:rows]
    tl.store(dw_ptr + stripe * h + i, dw, mask=inside)
    tl.store(db_ptr + stripe * h + i, db, mask=inside)


class LayerNorm(torch.autograd.Function):
    """Layer norm of x [rows, h] with weight and bias [h]. Mean and 1/σ are in fp32."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps=1e-5):
        x = x.contiguous()
        (rows, h), y = x.shape, torch.empty_like(x)
        mean, rstd = x.new_empty(2, rows, dtype=torch.float32).unbind()
        block = triton.next_power_of_2(h)
        forward_kernel[(rows,)](x, weight, bias, y, mean, rstd, h, eps, BLOCK=block)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight, mean, rstd = ctx.saved_tensors
        (rows, h), dx = x.shape, torch.empty_like(x)
        stripes = min(rows, 256 if x.is_cuda else 4)
        dw, db = x.new_empty(2, stripes, h, dtype=torch.float32).unbind()
        dy = dy.contiguous()  # the gradient of a sum has strides of 0
        backward_kernel[(stripes,)](
            dy, x, weight, mean, rstd, dx, dw, db, rows, h, BLOCK=triton.next_power_of_2(h)
        )
        return dx, dw.sum(0).to(weight.dtype), db.sum(0).to(weight.dtype), None


def main() -> None:
    on_gpu = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    for rows, h in ((1, 1), (3, 31), (9, 33), (7, 1000), (2, 4097)):
        # x and dy are stored column by column, so a kernel that ignores strides would fail
        x = torch.randn(h, rows, device=device).T.requires_grad_()
        weight = torch.randn(h, device=device).requires_grad_()
        bias = torch.randn(h, device=device).requires_grad_()
        dy = torch.randn(h, rows, device=device).T
        y = LayerNorm.apply(x, weight, bias)
        ours = y, *torch.autograd.grad(y, (x, weight, bias), dy)
        x64, w64, b64 = (t.detach().double().requires_grad_() for t in (x, weight, bias))
        exact = torch.nn.functional.layer_norm(x64, (h,), w64, b64)
        exact = exact, *torch.autograd.grad(exact, (x64, w64, b64), dy.double())
        for mine, reference in zip(ours, exact, strict=True):
            torch.testing.assert_close(mine, reference.float(), rtol=1e-4, atol=1e-4)
        print(f"{rows} x {h}: y, dx, dw and db equal to float64")
    if on_gpu:
        x = torch.randn(16384, 4096, device=device)
        weight, bias, out = torch.randn(4096, device=device), x[0].clone(), torch.empty_like(x)
        copy_ms = triton.testing.do_bench(lambda: out.copy_(x))
        library = lambda: torch.nn.functional.layer_norm(x, (4096,), weight, bias)  # noqa: E731
        for name, run in (
            ("ours", lambda: LayerNorm.apply(x, weight, bias)),
            ("torch", library),
        ):
            ms = triton.testing.do_bench(run)
            print(f"forward, {name}: ≈{100 * copy_ms / ms:.0f}% of a copy's speed")


if __name__ == "__main__":
    main()
