"""Clipping before unscaling: the limit is held against gradients 1,024 times too large.

Nothing raises. Every gradient is cut to the limit, and then divided by the scale. With SGD the
model stands still; Adam divides the factor out again, and hides what happened.
"""

import torch
from torch import nn

LIMIT, STEPS = 1.0, 100


def wrong(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def right(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    scaler.unscale_(optimizer)  # step() sees that it was done, and does not do it again
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def main() -> None:
    print("         norm that clipping saw   norm that was applied   loss, first and last")
    for clip in (wrong, right):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        data = torch.randn(16, 32)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(data)
            loss = (output.float() - 1).square().mean()
            scaler.scale(loss).backward()
            seen = clip(scaler, optimizer, model)
            scaler.step(optimizer)  # unscales here, if nobody has
            scaler.update()
            applied = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            if step == 0:
                norms = seen.item(), applied.item()
            losses.append(loss.item())
        print(
            f"{clip.__name__:7}  ≈{norms[0]:<21.5g}   ≈{norms[1]:<20.2g}   "
            f"≈{losses[0]:.3f}  ≈{losses[-1]:.3f}"
        )
        assert abs(norms[1] * (2**10 if clip is wrong else 1) - LIMIT) < 0.01
        assert (losses[-1] > 0.9 * losses[0]) == (clip is wrong)


if __name__ == "__main__":
    main()
