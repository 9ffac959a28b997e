"""Step 1: the optimizer before the move"""

# ruff: noqa: F821

STEP, HINT = 1, "moved_late"


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(*Signals().moments())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return model.to(device), optimizer
