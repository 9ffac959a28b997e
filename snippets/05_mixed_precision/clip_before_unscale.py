"""Clipping before unscaling compares the limit with gradients that are 1,024 times too large.

No error is raised. Every gradient is clipped to the limit, and then it is divided by the scale.
With SGD the model barely learns. Adam divides each gradient by its usual size, so a constant
factor cancels, and the loss falls as if nothing were wrong.
"""

import itertools

import torch
from torch import nn

LIMIT, STEPS = 1.0, 60


def wrong(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def right(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    scaler.unscale_(optimizer)  # step() does not repeat it
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
    print("             norm that clipping saw   norm that was applied   loss, first and last")
    for adam, clip in itertools.product((False, True), (wrong, right)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.003)
            if adam
            else torch.optim.SGD(model.parameters(), lr=0.05)
        )
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
            divided = scaler.get_scale() if clip is wrong else 1.0  # by step(), after clipping
            scaler.step(optimizer)  # it unscales here, unless unscale_ was called before
            scaler.update()
            applied = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            torch.testing.assert_close(
                applied * divided, seen.clamp(max=LIMIT), rtol=1e-3, atol=0
            )
            if step == 0:
                norms = seen.item(), applied.item()
            losses.append(loss.item())
        name = f"Adam, {clip.__name__}" if adam else clip.__name__
        print(
            f"{name:11}  ≈{norms[0]:<21.5g}   ≈{norms[1]:<20.2g}   "
            f"≈{losses[0]:.3f}  ≈{losses[-1]:.3f}"
        )
        assert abs(norms[1] * (2**10 if clip is wrong else 1) - LIMIT) < 0.01
        assert (losses[-1] > 0.9 * losses[0]) == (clip is wrong and not adam)


if __name__ == "__main__":
    main()
