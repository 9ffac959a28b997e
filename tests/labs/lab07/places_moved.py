"""Step 1: a copy in every step"""

# ruff: noqa: F821

STEP, HINT = 1, "made_and_moved"


class Net:
    def places(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(x.shape[1]).to(x.device)
