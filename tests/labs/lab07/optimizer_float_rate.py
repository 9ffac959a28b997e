"""Step 7: a rate that is a number"""

# ruff: noqa: F821

STEP, HINT = 7, "rate_is_a_number"


def fast_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, capturable=True)
