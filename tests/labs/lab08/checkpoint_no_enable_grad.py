# ruff: noqa: F821 (names of the lab)
"""Step 6: nothing is recorded in backward"""

STEP, HINT = 6, "enable_grad"


class Checkpoint:
    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        now = random_state(x.device)
        set_random_state(ctx.state, x.device)
        output = ctx.block(x)
        set_random_state(now, x.device)
        output.backward(gradient)
        return None, x.grad
