# ruff: noqa: F821 (names of the lab)
"""Step 4: a hook that gets the gradient"""

STEP, HINT = 4, "hook_kind"


class AdamInBackward:
    def __init__(self, model: nn.Module):
        self.states = {
            p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for p in model.parameters()
        }
        for p in model.parameters():
            p.register_hook(self.ready)
