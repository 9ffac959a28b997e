"""Failure: a row of zeros has a scale of 0, and 0/0 is NaN.

Dead channels, pruned rows and padded tokens are such rows. The fix is a smallest step. A scale
that is stored in fp16 may become 0 as well. Then the row is lost without a NaN.
"""

import torch


# --8<-- [start:wrong]
def wrong(w: torch.Tensor) -> torch.Tensor:
    """Symmetric int8 with one scale per row."""
    step = w.abs().amax(1, keepdim=True) / 127
    return (w / step).round().clamp(-127, 127) * step


# --8<-- [end:wrong]


# --8<-- [start:right]
def right(w: torch.Tensor, smallest: float = torch.finfo(torch.float32).tiny) -> torch.Tensor:
    step = (w.abs().amax(1, keepdim=True) / 127).clamp(min=smallest)
    return (w / step).round().clamp(-127, 127) * step


# --8<-- [end:right]


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(8, 64, generator=generator)
    w[3] = 0  # a dead channel
    w[5] *= 1e-7  # a nearly dead one
    x = torch.randn(4, 64, generator=generator)
    for scheme in (wrong, right):
        back = scheme(w)
        rows = back.isnan().any(1).nonzero().flatten().tolist()
        mixed = (x @ back.T).softmax(-1)  # one such output is enough for all
        print(f"{scheme.__name__:5}: rows with NaN {rows}, "
              f"NaN behind a softmax {mixed.isnan().float().mean().item():.0%}")  # fmt: skip
        assert rows == ([3] if scheme is wrong else [])
        assert mixed.isnan().all() if scheme is wrong else mixed.isfinite().all()
    error = (back - w).norm(dim=1) / w.norm(dim=1).clamp(min=1e-30)
    assert error.max() < 0.02 and (back[3] == 0).all()
    print(f"error of row 5: {error[5]:.1%}")
    # the smallest step of PyTorch's observers is larger than the step of row 5
    coarse = right(w, torch.finfo(torch.float32).eps)
    assert 0.2 < (coarse - w)[5].norm() / w[5].norm() < 0.5 and (coarse[3] == 0).all()

    step = (w[5].abs().max() / 127).half()
    print(f"its step, {w[5].abs().max() / 127:.1e}, in float16: {step:.1e}")
    lost = (w[5] / step.float()).round().clamp(-127, 127) * step.float()
    assert step == 0 and (lost == 0).all()  # infinity, clamped to 127, times 0
    step = (w[5].abs().max() / 127).bfloat16().float()  # bf16 has the range of fp32
    kept = (w[5] / step).round().clamp(-127, 127) * step
    assert (kept - w[5]).norm() < 0.02 * w[5].norm()


if __name__ == "__main__":
    main()
