# ruff: noqa: F821 (names of the lab)
"""Step 6: the old state stays"""

STEP, HINT = 6, "put_back"


class Checkpoint:
    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        set_random_state(ctx.state, x.device)
        with torch.enable_grad():
            output = ctx.block(x)
        output.backward(gradient)
        return None, x.grad
