"""Step 1: another learning rate"""

STEP, HINT = 1, "later"


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one update for all parameters."""
    return torch.optim.AdamW(parameters, lr=2 * RATE, fused=True)
