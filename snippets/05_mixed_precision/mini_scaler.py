"""GradScaler in fifty lines: the same decisions as torch's, step by step, and the same weights.

Two copies of a model train in fp16 autocast, one under each scaler. In some steps the loss is
multiplied until its gradients overflow, in the last of them one element is NaN; under a scale
of 2^16 they overflow by themselves. A growth interval of 4 instead of 2,000 shows the rhythm.
"""

import torch
from torch import nn

STEPS, OVERFLOWS, NAN = 20, {6, 7, 14}, 14


class MiniScaler:
    """Multiply the loss, divide the gradients, skip on an infinity, and adapt the factor."""

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value, self.growth_interval = scale, growth_interval
        self.good_steps = 0
        self.found_inf: dict[int, bool] = {}  # of each optimizer whose gradients are unscaled

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value  # and with the loss, by the chain rule, every gradient

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide all gradients of `optimizer`; remember whether one is infinite or NaN."""
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
        if id(optimizer) not in self.found_inf:
            self.unscale_(optimizer)
        if not self.found_inf[id(optimizer)]:  # else skip: weights, moments and step count stay
            optimizer.step()

    def update(self) -> None:
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
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def main() -> None:
    ours, theirs = MiniScaler(growth_interval=4), torch.amp.GradScaler("cpu", growth_interval=4)
    runs = [(ours, *build()), (theirs, *build())]
    data = torch.randn(STEPS, 16, 32)
    print("step  scale     ours     torch    good steps  what happened")
    for step in range(STEPS):
        lines = []
        for scaler, model, optimizer in runs:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                output = model(data[step])
            loss = (output.float() - 1).square().mean()
            if step in OVERFLOWS - {NAN}:
                loss = loss * 1e6
            before = float(scaler.value if scaler is ours else scaler.get_scale())
            scaler.scale(loss).backward()
            if step == NAN:
                model[0].weight.grad[0, 0] = torch.nan
            held = model[0].weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            after, good = (
                (scaler.value, scaler.good_steps)
                if scaler is ours
                else (scaler.get_scale(), scaler._get_growth_tracker())
            )
            lines.append((before, after, good, torch.equal(held, model[0].weight)))
        assert lines[0] == lines[1], (step, lines)
        before, after, good, skipped = lines[0]
        assert skipped or step not in OVERFLOWS
        powers = [f"2^{torch.tensor(x).log2().int()}" for x in (before, after, lines[1][1])]
        event = "grew" if after > before else "skipped" if skipped else ""
        event += ", overflow injected" if step in OVERFLOWS else ""
        row = f"{step:4}  {powers[0]:8}  {powers[1]:7}  {powers[2]:7}  {good:10}  {event}"
        print(row.rstrip())
    for p, q in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(p, q)
    print(f"after {STEPS} steps the two models are equal, bit for bit")


if __name__ == "__main__":
    main()
