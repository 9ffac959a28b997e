"""Step 15: parameter by parameter"""

STEP, HINT = 15, "optimizer"


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with one update for all parameters."""
    return torch.optim.AdamW(parameters, lr=RATE, foreach=False)
