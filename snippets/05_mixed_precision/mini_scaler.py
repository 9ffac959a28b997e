"""A loss scaler in fifty lines makes the same decisions as torch's GradScaler at every step.

Two copies of a model train with fp16 autocast, one with each scaler. In two steps the program
multiplies the loss until its gradients overflow, and in a third step it sets one element of a
gradient to NaN. With a scale of 2^16, some gradients overflow without any help. The scale grows
after 4 good steps instead of 2,000, so that 20 steps show the whole cycle. Look at the columns
"ours" and "torch", which must be equal. Draws mini_scaler.svg.
"""

import math

import torch
from torch import nn

STEPS, OVERFLOWS, NAN = 20, {6, 7, 14}, 14
RESTARTS = {2, 9, 13}  # before these steps, new scalers load the states of the old ones
WIDTH, BAR, INK = 720, 32, "#52525b"
COLOURS = {"skipped": "#c2410c", "grew": "#15803d", "": "#0b6e99"}


class MiniScaler:
    """Multiply the loss, divide the gradients, skip overflowed steps, and adapt the scale."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval = scale, growth_interval
        self.good_steps = 0
        self.found_inf: dict[int, bool] = {}  # for each optimizer whose gradients are unscaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value  # by the chain rule, this multiplies every gradient

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of `optimizer`. Record whether one is infinite or NaN."""
        if id(optimizer) in self.found_inf:
            raise RuntimeError("unscale_() has already been called since the last update()")
        found = False
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    found |= not bool(p.grad.isfinite().all())
                    p.grad.mul_(1 / self.value)
        self.found_inf[id(optimizer)] = found

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()`, unless one of its gradients is infinite or NaN."""
        if id(optimizer) not in self.found_inf:
            self.unscale_(optimizer)
        if not self.found_inf[id(optimizer)]:
            optimizer.step()

    def update(self) -> None:
        """Halve the scale after an overflow. Double it after enough good steps in a row."""
        if any(self.found_inf.values()):
            self.value, self.good_steps = self.value * 0.5, 0
        else:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.value, self.good_steps = self.value * 2, 0
        self.found_inf.clear()

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self.good_steps = state["scale"], state["good_steps"]


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    groups = [{"params": part.parameters()} for part in (model[0], model[2])]
    return model, torch.optim.Adam(groups, lr=0.01)


def draw(steps: list[tuple[float, str]]) -> str:
    """Return a picture of the scale in each step, from (scale, event) pairs."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 252" '
        'font-family="system-ui, sans-serif" font-size="14">'
    ]
    for step, (scale, event) in enumerate(steps):
        x, height = 62 + BAR * step, 40 * (math.log2(scale) - 12)
        colour, y = COLOURS[event], 210 - height
        parts.append(
            f'<rect x="{x}" y="{y}" width="{BAR - 6}" height="{height}" fill="{colour}" '
            f'fill-opacity="0.2" stroke="{colour}" stroke-width="1.5"/>'
        )
        words = {"skipped": "skip", "grew": "×2", "": ""}[event]
        middle = f'text-anchor="middle" x="{x + BAR / 2 - 3}"'
        parts.append(f'<text {middle} y="{y - 6}" fill="{colour}">{words}</text>')
        parts.append(f'<text {middle} y="228" fill="{INK}">{step}</text>')
    for power in range(13, 17):
        y = 210 - 40 * (power - 12) + 5
        parts.append(
            f'<text x="52" y="{y}" fill="{INK}" text-anchor="end">2'
            f'<tspan dy="-5" font-size="10">{power}</tspan></text>'
        )
    parts.append(f'<text x="8" y="18" fill="{INK}">scale S</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="247" fill="{INK}" text-anchor="middle">step</text>')
    return "\n".join([*parts, "</svg>", ""])


def scalers(interval: int) -> list:
    """Return our scaler and torch's, which double the scale after this many good steps."""
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    return [MiniScaler(growth_interval=interval), theirs]


def check_two_optimizers() -> None:
    """An overflow skips the step of its own optimizer only. All optimizers share a scale."""
    ours, theirs = MiniScaler(), torch.amp.GradScaler("cpu")
    assert ours.growth_interval == theirs.get_growth_interval()
    ours, theirs = scalers(2)
    scale = 2.0**16
    good = [((0, 0), 1), ((0, 0), 2)]
    rounds = [*good, ((1, 0), 0.5), ((0, 1), 0.5), ((1, 1), 0.5), *good]
    weights = [[nn.Parameter(torch.zeros(1)) for _ in range(2)] for _ in (ours, theirs)]
    expected = [0.0, 0.0]
    for overflows, factor in rounds:
        for scaler, pair in zip((ours, theirs), weights, strict=True):
            unused = nn.Parameter(torch.zeros(1))  # its gradient is None
            optimizers = [torch.optim.SGD([weight, unused], lr=1) for weight in pair]
            for weight, overflow in zip(pair, overflows, strict=True):
                weight.grad = None
                scaler.scale(weight.sum() * (torch.inf if overflow else 1)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        scale *= factor
        expected = [e - 1 + overflow for e, overflow in zip(expected, overflows, strict=True)]
        assert [[w.item() for w in pair] for pair in weights] == [expected] * 2, overflows
        assert ours.value == theirs.get_scale() == scale, overflows


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
    check_two_optimizers()
    runs = [[scaler, *build()] for scaler in scalers(4)]
    data = torch.randn(STEPS, 16, 32)
    history: list[tuple[float, str]] = []
    print("step  scale     ours     torch    good steps  what happened")
    for step in range(STEPS):
        lines = []
        if step in RESTARTS:
            for run, fresh in zip(runs, scalers(4), strict=True):
                fresh.load_state_dict(run[0].state_dict())
                run[0] = fresh
        for scaler, model, optimizer in runs:
            ours = isinstance(scaler, MiniScaler)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(data[step])
            loss = (output.float() - 1).square().mean()
            if step in OVERFLOWS - {NAN}:
                loss = loss * 1e6
            before = float(scaler.value if ours else scaler.get_scale())
            scaler.scale(loss).backward()
            if step == NAN:
                model[0].bias.grad[0] = torch.nan
            weight_before = model[0].weight.detach().clone()
            if step % 2:  # before clipping, a loop unscales the gradients itself, but only once
                scaler.unscale_(optimizer)
                try:
                    scaler.unscale_(optimizer)
                except RuntimeError as error:
                    assert "already been called" in str(error)
                else:
                    raise AssertionError("the gradients were unscaled twice")
            scaler.step(optimizer)
            scaler.update()
            after, good = (
                (scaler.value, scaler.good_steps)
                if ours
                else (scaler.get_scale(), scaler._get_growth_tracker())
            )
            lines.append((before, after, good, torch.equal(weight_before, model[0].weight)))
        assert lines[0] == lines[1], (step, lines)
        before, after, good, skipped = lines[0]
        assert skipped or step not in OVERFLOWS
        powers = [f"2^{torch.tensor(x).log2().int()}" for x in (before, after, lines[1][1])]
        event = "grew" if after > before else "skipped" if skipped else ""
        history.append((before, event))
        words = event + (", overflow injected" if step in OVERFLOWS else "")
        row = f"{step:4}  {powers[0]:8}  {powers[1]:7}  {powers[2]:7}  {good:10}  {words}"
        print(row.rstrip())
    for p, q in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(p, q)
    moments = [run[2].state_dict()["state"][0] for run in runs]
    taken = STEPS - sum(event == "skipped" for _, event in history)
    assert moments[0]["step"] == moments[1]["step"] == taken  # a skipped step does not count
    print(f"after {STEPS} steps the two models are equal, bit for bit")
    with open("mini_scaler.svg", "w", encoding="utf-8") as file:
        file.write(draw(history))


if __name__ == "__main__":
    main()
