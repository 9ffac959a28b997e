"""A NaN that no scale can cure: GradScaler skips every step, and its scale shrinks to 0.

The square root has an infinite slope at 0, and 0 · inf is NaN. The loss itself is fine, so a
curve shows a flat line and no error. When the scale is 0, even the fixed loss cannot bring it
back: growth multiplies, and 1/0 is infinite.
"""

import math

import torch
from torch import nn

STEPS, PATIENCE = 170, 25


def wrong(output: torch.Tensor) -> torch.Tensor:
    """Mean distance of pairs; a pair of equal samples has distance 0, and a gradient of NaN."""
    return (output[0::2] - output[1::2]).square().sum(-1).sqrt().mean()


def right(output: torch.Tensor) -> torch.Tensor:
    return ((output[0::2] - output[1::2]).square().sum(-1) + 1e-8).sqrt().mean()


def main() -> None:
    print("loss    skipped   loss at first and last   scale at the end   guard")
    for loss_of in (wrong, right):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        data = torch.randn(32, 16)
        data[1] = data[0]  # one pair of equal samples
        losses, skipped, in_a_row, alarm = [], 0, 0, None
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(data)
            loss = loss_of(output.float())
            losses.append(loss.item())
            before = scaler.get_scale()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            missed = scaler.get_scale() < before or before == 0  # the scale fell: no step taken
            skipped, in_a_row = skipped + missed, in_a_row + 1 if missed else 0
            if in_a_row == PATIENCE and alarm is None:
                names = [n for n, p in model.named_parameters() if not p.grad.isfinite().all()]
                alarm = f"step {step}: {PATIENCE} skipped, not finite: {names[0]} …"
        print(
            f"{loss_of.__name__:6}  {skipped:7}   ≈{losses[0]:.3f}  ≈{losses[-1]:.3f}"
            f"           {scaler.get_scale():<16g}   {alarm or 'silent'}"
        )
        assert torch.equal(data[0], data[1])  # the fix meets the same pair
        assert all(map(math.isfinite, losses))  # nothing to see in the curve
        assert (scaler.get_scale() == 0 and skipped == STEPS) == (loss_of is wrong)
        assert (losses[-1] == losses[0]) == (loss_of is wrong)


if __name__ == "__main__":
    main()
