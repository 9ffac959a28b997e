"""fp16 with and without a loss scale, bf16 without: the same run, the gradients that get lost.

The loss is a mean over samples times a small weight, as an auxiliary loss has. So the gradients
in backward are small. In fp16 they vanish; a scale saves them; bf16 has no need of it.
"""

import torch
from torch import nn

SAMPLES, H, STEPS, WEIGHT = 128, 64, 60, 1e-5


def train(dtype: torch.dtype, scale: bool) -> tuple[list[float], torch.Tensor]:
    """Losses (before the small weight), and the gradients of the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1)
    )
    x = torch.randn(SAMPLES, H)
    target = x[:, :1] * x[:, 1:2]  # what no linear model learns
    linear = x @ torch.linalg.lstsq(x, target).solution
    assert (linear - target).norm() > 0.5 * target.norm()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
    scaler = torch.amp.GradScaler("cpu", enabled=scale)  # disabled it passes everything through
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = model(x)
        loss = (output.float() - target).square().mean()
        scaler.scale(WEIGHT * loss).backward()
        scaler.unscale_(optimizer)
        if step == 0:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, gradients


def main() -> None:
    print("             zero gradients, step 0   loss at first and last")
    ends, firsts = {}, {}
    for name, dtype, scale in (
        ("fp32", torch.float32, False),
        ("fp16", torch.float16, False),
        ("fp16, scaled", torch.float16, True),
        ("bf16", torch.bfloat16, False),
    ):
        losses, firsts[name] = train(dtype, scale)
        lost = firsts[name].eq(0).double().mean().item()
        ends[name] = losses[-1]
        print(f"{name:12} {f'≈{lost:.1%}':>22}   ≈{losses[0]:.3f}  ≈{losses[-1]:.3f}")
        assert (lost > 0.3) == (name == "fp16")
        error = (firsts[name] - firsts["fp32"]).norm() / firsts["fp32"].norm()
        low, high = {"fp16, scaled": (1e-4, 2e-3), "bf16": (2e-3, 2e-2)}.get(name, (0, 1.1))
        assert low <= error <= high
    assert max(ends["fp16, scaled"], ends["bf16"]) < 0.8 * ends["fp16"]


if __name__ == "__main__":
    main()
