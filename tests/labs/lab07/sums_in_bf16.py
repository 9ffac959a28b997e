"""Step 6: sums in bf16"""

# ruff: noqa: F821

STEP, HINT = 6, "sums_dtype"


def new_sums(device: torch.device) -> torch.Tensor:
    return torch.zeros(3, device=device, dtype=torch.bfloat16)
