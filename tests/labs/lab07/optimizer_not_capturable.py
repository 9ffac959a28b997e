"""Step 7: not capturable"""

# ruff: noqa: F821

STEP, HINT = 7, "not_capturable"


def fast_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(RATE, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
