# ruff: noqa: F821 (names of the lab)
"""Step 4: nobody calls ready"""

STEP, HINT = 4, "no_hook"


class AdamInBackward:
    def __init__(self, model: nn.Module):
        self.states = {
            p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for p in model.parameters()
        }
