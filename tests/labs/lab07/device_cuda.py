"""Step 1: knows one kind of accelerator"""

# ruff: noqa: F821

STEP, HINT = 1, "named"


def pick_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
