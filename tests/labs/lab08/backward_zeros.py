# ruff: noqa: F821 (names of the lab)
"""Step 4: gradients of zeros"""

STEP, HINT = 4, "grad_kept"


class AdamInBackward:
    @torch.no_grad()
    def ready(self, p: nn.Parameter) -> None:
        """Use the gradient of this parameter, and drop it."""
        state = self.states[p]
        state["t"] += 1
        update(p, p.grad, state["m"], state["v"], state["t"])
        p.grad.zero_()
