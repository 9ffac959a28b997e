"""Step 7: one operator for each parameter"""

# ruff: noqa: F821

STEP, HINT = 7, "not_fused"


def fast_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    rate = torch.tensor(RATE, device=next(model.parameters()).device)
    return torch.optim.AdamW(model.parameters(), lr=rate, fused=False, capturable=True)
