# ruff: noqa: F821 (names of the lab)
"""Step 4: a hook for the last parameter"""

STEP, HINT = 4, "no_hook"


class AdamInBackward:
    def __init__(self, model: nn.Module):
        self.states = {
            p: {"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0}
            for p in model.parameters()
        }
        for p in model.parameters():
            last = p
        last.register_post_accumulate_grad_hook(self.ready)
