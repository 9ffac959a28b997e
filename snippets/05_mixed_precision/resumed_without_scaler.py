"""Without the scaler's state in the checkpoint, the resumed run skips steps again.

The scale starts again at 65,536, and the scaler must halve it until the gradients fit. Each
halving costs one step. If the checkpoint has the state, the resumed run ends with the same
weights as the uninterrupted run, bit for bit.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

HALF, STEPS, SAVED_AT, H = torch.float16, 30, 15, 32


def batch(t: int) -> torch.Tensor:
    return torch.randn(16, H, generator=torch.Generator().manual_seed(t))


def step(model: nn.Module, optimizer, scaler: torch.amp.GradScaler, t: int) -> bool:
    """Train one step. Return whether the optimizer stepped. The loss needs a small scale."""
    x = batch(t)
    with torch.autocast("cpu", HALF):
        loss = 4000 * F.mse_loss(model(x), x)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= before


def build() -> tuple[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, H))
    return model, torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu")


def main() -> None:
    torch.set_num_threads(1)  # the tensors are small, so a second thread would only wait
    model, optimizer, scaler = build()
    taken = []
    for t in range(STEPS):
        if t == SAVED_AT:
            checkpoint = copy.deepcopy(
                [part.state_dict() for part in (model, optimizer, scaler)]
            )
        taken.append(step(model, optimizer, scaler, t))
    assert not torch.equal(batch(SAVED_AT), batch(STEPS))  # each step has its own batch
    first, rest = taken[:SAVED_AT].count(False), taken[SAVED_AT:].count(False)
    print(f"uninterrupted: {first} of the first {SAVED_AT} steps skipped, {rest} later")
    print(f"  the scaler's state: {checkpoint[2]}")
    for with_scaler in (False, True):
        resumed = build()
        for part, state in zip(resumed, checkpoint[: 2 + with_scaler], strict=False):
            part.load_state_dict(copy.deepcopy(state))  # Adam changes these tensors
        taken = [step(*resumed, t) for t in range(SAVED_AT, STEPS)]
        same = all(
            torch.equal(p, q)
            for p, q in zip(model.parameters(), resumed[0].parameters(), strict=True)
        )
        assert same == with_scaler
        # the count of good steps must continue, too, or the scale would grow too late
        assert (resumed[2].state_dict() == scaler.state_dict()) == with_scaler
        adam = resumed[1].state_dict()["state"][0]
        assert adam["step"] == SAVED_AT - first + taken.count(True)  # the count continues
        print(f"resumed {'with' if with_scaler else 'without'} the scaler's state:")
        print(f"  {taken.count(False)} steps skipped, same weights at the end: {same}")


if __name__ == "__main__":
    main()
