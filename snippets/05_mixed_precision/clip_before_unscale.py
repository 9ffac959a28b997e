"""Clipping before unscaling compares the limit with gradients that are 1,024 times too large.

No error is raised. Every gradient is clipped to the limit, and then it is divided by the scale.
With SGD the model barely learns. Adam divides each gradient by its usual size, so a constant
factor cancels, and the loss falls as if nothing were wrong.
"""

import itertools

import torch
from torch import nn

LIMIT, STEPS, LR = 1.0, 60, 0.05
OVERFLOW = STEPS - 1  # in this step, the program sets a gradient element to infinity


def wrong(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def right(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, model: nn.Module):
    scaler.unscale_(optimizer)  # step() does not repeat it
    return nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
    print("             norm that clipping saw   norm that was applied   loss, first and last")
    first = []
    for adam, clip in itertools.product((False, True), (wrong, right)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = (
            torch.optim.Adam(model.parameters(), lr=0.003)
            if adam
            else torch.optim.SGD(model.parameters(), lr=LR)
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        data = torch.randn(16, 32)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            with torch.autocast("cpu", torch.float16):
                output = model(data)
            loss = (output.float() - 1).square().mean()
            scaler.scale(loss).backward()
            if step == OVERFLOW:
                model[0].bias.grad[0] = torch.inf
            seen = clip(scaler, optimizer, model)
            divided = 2.0**10 if clip is wrong else 1.0  # by step(), after clipping
            scaler.step(optimizer)  # it unscales here, unless unscale_ was called before
            scaler.update()
            applied = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moved = weights - nn.utils.parameters_to_vector(model.parameters()).detach()
            assert output.dtype == torch.float16
            assert moved.any() == (step != OVERFLOW)  # only the overflow is skipped
            if step != OVERFLOW:
                clipped = seen.clamp(max=LIMIT)
                torch.testing.assert_close(applied * divided, clipped, rtol=1e-3, atol=0)
                assert adam or abs(moved.norm() / (LR * applied) - 1) < 0.01
            if step == 0:
                first.append((seen.item(), applied.item(), moved))
            losses.append(loss.item())
        name = f"Adam, {clip.__name__}" if adam else clip.__name__
        saw, norm, _ = first[-1]
        print(
            f"{name:11}  ≈{saw:<21.5g}   ≈{norm:<20.2g}   ≈{losses[0]:.3f}  ≈{losses[-1]:.3f}"
        )
        stuck = clip is wrong and not adam
        assert losses[-1] > 0.9 * losses[0] if stuck else losses[-1] < 0.01 * losses[0]
    saw, _, moved = zip(*first, strict=True)
    assert abs(saw[0] / saw[1] / 2**10 - 1) < 0.01
    assert (moved[2] - moved[3]).norm() < 0.1 * moved[3].norm()  # Adam cancels the factor


if __name__ == "__main__":
    main()
