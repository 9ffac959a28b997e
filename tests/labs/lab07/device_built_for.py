"""Step 1: takes what torch was built for"""

# ruff: noqa: F821

STEP, HINT = 1, "not_asked"


def pick_device() -> torch.device:
    return torch.accelerator.current_accelerator()
