"""Step 7: another object as the rate"""

# ruff: noqa: F821

STEP, HINT = 7, "rate_replaced"


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(value, device=group["lr"].device)
