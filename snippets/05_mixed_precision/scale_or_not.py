"""Train in fp16 with and without a loss scale, and in bf16 and fp32 without a scale.

The loss has a small weight, as an auxiliary loss has, so the gradients in backward are small.
Look at the column with the zero gradients: in fp16 without a scale, two thirds of the gradients
of the parameters are zero in the first step. With a scale, or in bf16, none are. The program
also compares the first gradients with those of fp32.
"""

import torch
from torch import nn

SAMPLES, H, STEPS, WEIGHT = 128, 64, 60, 1e-5


def train(dtype: torch.dtype, scale: bool) -> tuple[list[float], torch.Tensor]:
    """Return the losses (without the small weight), and the gradients of the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H), nn.Tanh(), nn.Linear(H, 1)
    )
    x = torch.randn(SAMPLES, H)
    target = x[:, :1] * x[:, 1:2]  # no linear model can learn it
    linear = x @ torch.linalg.lstsq(x, target).solution
    assert (linear - target).norm() > 0.5 * target.norm()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
    # --8<-- [start:loop]
    scaler = torch.amp.GradScaler("cpu", enabled=scale)  # if disabled, it only takes steps
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            output = model(x)
        assert output.dtype == dtype
        loss = (output.float() - target).square().mean()
        scaler.scale(WEIGHT * loss).backward()
        scaler.unscale_(optimizer)
        if step == 0:
            gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    # --8<-- [end:loop]
    return losses, gradients


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
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
        assert low <= error <= high  # fp16 has three bits more than bf16
    assert max(ends["fp16, scaled"], ends["bf16"]) < 0.1 * ends["fp16"]
    alive = firsts["fp16"] != 0  # what is left of the gradient is not zero, but it has few bits
    cosine = nn.functional.cosine_similarity(firsts["fp16"], firsts["fp32"], dim=0)
    assert 0.1 < alive.double().mean() < 0.5 and cosine < 0.999


if __name__ == "__main__":
    main()
