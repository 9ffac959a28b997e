"""GradScaler skips every step, and its scale becomes 0, because no scale can remove a NaN.

The slope of the square root at 0 is infinite, and 0 · inf is NaN. The loss itself is finite, so
its curve is a flat line, and no error is raised. As soon as the scale is 0, a corrected loss
makes it worse: the scaled gradients are 0, so the scaler finds no infinity. It divides them by
the scale, and the optimizer makes a step with the result, which is NaN. Look at the column
"guard": a counter of skipped steps finds the problem at step 24.
"""

import math
import warnings

import torch
from torch import nn

STEPS, PATIENCE = 170, 25


def wrong(output: torch.Tensor) -> torch.Tensor:
    """Return the mean distance of pairs. The gradient of a pair of equal samples is NaN."""
    return (output[0::2] - output[1::2]).square().sum(-1).sqrt().mean()


def right(output: torch.Tensor) -> torch.Tensor:
    """Return nearly the same distance, with a finite slope at 0."""
    return ((output[0::2] - output[1::2]).square().sum(-1) + 1e-8).sqrt().mean()


def first_nan(model: nn.Module, data: torch.Tensor) -> str:
    """Return what anomaly detection reports about the backward pass of the wrong loss."""
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # it warns that it is slow, and prints a traceback
        try:
            wrong(model(data)).backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
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
            missed = scaler.get_scale() < before or before == 0  # the step was skipped
            skipped, in_a_row = skipped + missed, in_a_row + 1 if missed else 0
            if in_a_row == PATIENCE and alarm is None:
                names = [n for n, p in model.named_parameters() if not p.grad.isfinite().all()]
                alarm = f"step {step}: {PATIENCE} skipped, not finite: {names[0]} …"
        print(
            f"{loss_of.__name__:6}  {skipped:7}   ≈{losses[0]:.3f}  ≈{losses[-1]:.3f}"
            f"           {scaler.get_scale():<16g}   {alarm or 'silent'}"
        )
        assert torch.equal(data[0], data[1])  # the corrected loss has the same pair
        assert all(map(math.isfinite, losses))  # the curve of the loss shows no problem
        assert (scaler.get_scale() == 0 and skipped == STEPS) == (loss_of is wrong)
        assert (losses[-1] == losses[0]) == (loss_of is wrong)
        if loss_of is wrong:
            print(f"        anomaly detection: {first_nan(model, data)}")
            model.zero_grad()
            scaler.scale(right(model(data))).backward()  # the loss is corrected too late
            before = model[0].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert before.isfinite().all() and model[0].weight.isnan().all()
            print("        then one step with the right loss: every weight is NaN")


if __name__ == "__main__":
    main()
