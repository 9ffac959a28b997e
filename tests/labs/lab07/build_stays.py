"""Step 1: the model stays on the CPU"""

# ruff: noqa: F821

STEP, HINT = 1, "not_moved"


def build(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net(*Signals().moments())
    return model, torch.optim.AdamW(model.parameters(), lr=RATE)
