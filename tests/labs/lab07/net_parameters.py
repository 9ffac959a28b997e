"""Step 1: constants as parameters"""

# ruff: noqa: F821

STEP, HINT = 1, "trained"


class Net:
    def keep(self, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.mean, self.std = nn.Parameter(mean), nn.Parameter(std)
