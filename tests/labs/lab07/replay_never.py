"""Step 7: runs the step"""

# ruff: noqa: F821

STEP, HINT = 7, "not_captured"


class Replayed:
    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.step(x, y)
