"""No inf checks were recorded for this optimizer: the loss has reached none of its parameters.

A model has two heads, each with an optimizer. In step 2 the batch has no sample for head B, so
no gradient exists for optimizer B. `GradScaler.step` finds nothing to check for infinities and
raises. The output shows what later calls do if the program catches the error. With the fix the
program steps only the optimizers that have gradients, and its parameters are compared with
those of training in float64 without a scaler.

    (no flag)    catch the errors, and print what every call does
    --fix        step an optimizer only if one of its parameters has a gradient
"""

import argparse

import torch
from torch import nn

STEPS = 4
SAYS_STEP = "AssertionError: No inf checks were recorded for this optimizer."
SAYS_UPDATE = "AssertionError: No inf checks were recorded prior to update."


def make_heads(dtype: torch.dtype) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 1) for name in "AB"}).to(dtype)


def loss_of(heads: nn.ModuleDict, step: int) -> torch.Tensor:
    """The loss of the heads in one step; the batch of step 2 has no sample for head B."""
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    x = x.to(heads["A"].weight.dtype)
    loss = (heads["A"](x) - 1).square().mean()
    return loss if step == 2 else loss + (heads["B"](x) + 1).square().mean()


def has_gradient(optimizer: torch.optim.Optimizer) -> bool:
    groups = optimizer.param_groups
    return any(p.grad is not None for group in groups for p in group["params"])


def try_out(call, *arguments) -> str:
    """The error of a call, or "completes"."""
    try:
        call(*arguments)
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "completes"


# --8<-- [start:careless]
def careless(names: str, update_alone: bool, fused: bool = False) -> list[str]:
    """Make three steps and catch errors. If `update_alone`, an error never skips update()."""
    heads, said = make_heads(torch.float32), []
    optimizers = {n: torch.optim.SGD(heads[n].parameters(), lr=0.1, fused=fused) for n in names}
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in (1, 2, 3):
        heads.zero_grad()
        scaler.scale(loss_of(heads, step)).backward()
        for name, optimizer in optimizers.items():
            outcome = try_out(scaler.step, optimizer)
            said.append(f"step {step}, step(optimizer {name}): {outcome}")
        if update_alone or outcome == "completes":  # one try around both skips the update
            said.append(f"step {step}, update(): {try_out(scaler.update)}")
    return said


# --8<-- [end:careless]


# --8<-- [start:careful]
def careful() -> nn.ModuleDict:
    """Train both heads. Step an optimizer only if it has gradients."""
    heads = make_heads(torch.float32)
    optimizers = [torch.optim.SGD(heads[name].parameters(), lr=0.1) for name in "AB"]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(1, STEPS + 1):
        heads.zero_grad()  # sets the gradients to None, so an old gradient cannot count
        scaler.scale(loss_of(heads, step)).backward()
        for optimizer in optimizers:
            if has_gradient(optimizer):
                scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0  # the scaler is in use, and has found no inf
    return heads


# --8<-- [end:careful]


def reference() -> nn.ModuleDict:
    """The same steps in float64, by hand, without an optimizer or a scaler."""
    heads = make_heads(torch.float64)
    for step in range(1, STEPS + 1):
        parameters = list(heads.parameters())
        slopes = torch.autograd.grad(loss_of(heads, step), parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter -= 0.1 * (0 if slope is None else slope)
    return heads


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    if parser.parse_args().fix:
        pair = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        pair[1].square().backward()  # one gradient of two is enough for a step
        assert has_gradient(torch.optim.SGD(pair, lr=0.1))
        heads, truth = careful(), reference()
        for ours, theirs in zip(heads.parameters(), truth.parameters(), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-6)
        print(f"{STEPS} steps, head B without a gradient in step 2: equal to float64")
        return

    said = {
        "two optimizers, and update() is called in every step": careless("AB", True),
        "two optimizers, and the error also skips update()": careless("AB", False),
        "optimizer B alone": careless("B", True),
        "optimizer B alone, fused=True": careless("B", True, fused=True),
    }
    for title, lines in said.items():
        print(title)
        for line in lines[lines.index(next(x for x in lines if x.startswith("step 2"))) :]:
            print(f"  {line}")
    healthy, skipped, alone, fused = said.values()
    assert healthy[4] == f"step 2, step(optimizer B): {SAYS_STEP}"
    assert all(line.endswith(": completes") for line in healthy[5:])  # update() clears it
    assert skipped[-2].startswith("step 3, step(optimizer A): RuntimeError: step() has already")
    assert skipped[-1] == f"step 3, step(optimizer B): {SAYS_STEP}"  # and B has a gradient now
    assert [line.partition(": ")[2] for line in alone[2:]] == [SAYS_STEP, SAYS_UPDATE] * 2
    assert [line.partition(": ")[2] for line in fused[2:4]] == ["completes", SAYS_UPDATE]


if __name__ == "__main__":
    main()
