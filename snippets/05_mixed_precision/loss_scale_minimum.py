"""Current loss scale already at minimum: no scale helps if the forward pass overflows.

A dynamic loss scaler halves the scale and skips the step if a gradient is not finite. In a
healthy model a few steps are skipped, and then the scale is small enough. In the second model
the outputs of one layer are larger than 65,504, the largest number of fp16. Its gradients are
not finite at any scale, so the scaler skips every step until the scale reaches its minimum.
The rule is that of DeepSpeed's DynamicLossScaler with a hysteresis of 1.

    (no flag)    the error, the layer that causes it, and what a lower minimum changes
    --fix        the same model in bf16, without a scaler, compared with float64
"""

import argparse
import math

import torch
from torch import nn

WIDTH, STEPS, SIZE = 16, 60, 1e5  # features, steps, size of the outputs that overflow


class Net(nn.Module):
    """Two layers without biases; the outputs of `up` are about as large as `size`."""

    def __init__(self, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight *= size
            self.down.weight /= size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def inputs() -> torch.Tensor:
    return torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


# --8<-- [start:scaler]
class LossScaler:
    """Halve the scale at an overflow; raise an error if it cannot fall any further."""

    def __init__(self, scale: float, minimum: float) -> None:
        self.scale, self.minimum = scale, minimum

    def update(self, overflow: bool) -> None:
        if overflow and self.scale == self.minimum:
            message = "Current loss scale already at minimum - cannot decrease scale anymore."
            raise Exception(f"{message} Exiting run.")  # the type and the text of DeepSpeed
        if overflow:
            self.scale = max(self.scale / 2, self.minimum)


# --8<-- [end:scaler]


# --8<-- [start:train]
def train(
    size: float, dtype: torch.dtype, scaler: LossScaler | None = None
) -> tuple[list[float], int, str]:
    """Train the last layer; return the losses, the number of skipped steps, and the error."""
    exact = dtype == torch.float64
    model = Net(size).to(torch.float64 if exact else torch.float32)
    weight = model.down.weight
    x = inputs().to(weight.dtype)
    optimizer = torch.optim.Adam([weight], lr=0.1 / size)
    losses, skipped = [], 0
    for _ in range(STEPS):
        scale = scaler.scale if scaler else 1.0
        with torch.autocast("cpu", dtype, enabled=not exact):
            output = model(x)
        assert output.dtype == dtype
        loss = nn.functional.mse_loss(output.to(x.dtype), x.flip(1))
        weight.grad = torch.autograd.grad(loss * scale, weight)[0] / scale
        overflow = not weight.grad.isfinite().all()
        if overflow:
            skipped += 1  # the optimizer makes no step
        else:
            optimizer.step()
            losses.append(loss.item())
        try:
            if scaler:
                scaler.update(overflow)
        except Exception as error:
            return losses, skipped, f"{type(error).__name__}: {error}"
    return losses, skipped, "no error"


# --8<-- [end:train]


# --8<-- [start:culprit]
def first_overflow(model: nn.Module) -> str | None:
    """Return the name of the first layer with an output that is not finite in fp16."""
    found = []

    def look(name: str, output: torch.Tensor) -> None:
        if not output.isfinite().all():
            found.append(name)

    for name, layer in model.named_children():
        layer.register_forward_hook(lambda _, __, output, name=name: look(name, output))
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        model(inputs())
    return found[0] if found else None


# --8<-- [end:culprit]


def report(what: str, outcome: tuple[list[float], int, str]) -> None:
    losses, skipped, error = outcome
    print(f"{what}:\n   {skipped} steps skipped, {len(losses)} steps made, {error}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    if parser.parse_args().fix:
        low, skipped, error = train(SIZE, torch.bfloat16)
        report("bf16, no scaler", (low, skipped, error))
        truth = train(SIZE, torch.float64)[0]
        print(f"   loss in bf16    {low[0]:.3f} to {low[-1]:.3f}")
        print(f"   loss in float64 {truth[0]:.3f} to {truth[-1]:.3f}")
        torch.testing.assert_close(low, truth, rtol=0.02, atol=1e-4)
        assert len(low) == STEPS and low[-1] < low[0] / 10
        return

    scaler = LossScaler(2.0**32, 1.0)
    losses, skipped, error = train(1.0, torch.float16, scaler)
    report("outputs that fit into fp16", (losses, skipped, error))
    print(f"   the scale fell from 2^32 to 2^{math.log2(scaler.scale):.0f}")
    truth = train(1.0, torch.float64)[0]
    torch.testing.assert_close(losses, truth[: len(losses)], rtol=0.02, atol=2e-3)
    assert error == "no error" and skipped == 32 - math.log2(scaler.scale) > 0
    assert first_overflow(Net(1.0)) is None

    for what, power in (("outputs above 65,504", 0), ("with a minimum of 2^-20", -20)):
        losses, skipped, error = train(SIZE, torch.float16, LossScaler(2.0**32, 2.0**power))
        report(what, (losses, skipped, error))
        assert (losses, skipped) == ([], 33 - power) and "already at minimum" in error
    model = Net(SIZE)
    largest = model.up(inputs()).abs().max().item()
    name = first_overflow(model)
    print(f"first layer with an output that is not finite: {name}")
    print(f"   its largest output in fp32: {largest:,.0f}")
    assert name == "up" and largest > torch.finfo(torch.float16).max


if __name__ == "__main__":
    main()
