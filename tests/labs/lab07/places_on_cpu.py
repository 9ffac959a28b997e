"""Step 1: no device"""

# ruff: noqa: F821

STEP, HINT = 1, "made_on_cpu"


class Net:
    def places(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1])
