# ruff: noqa: F821 (names of the lab)
"""Step 6: forward records"""

STEP, HINT = 6, "recorded"


class Checkpoint:
    @staticmethod
    def forward(ctx, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.state = block, random_state(x.device)
        ctx.save_for_backward(x)
        with torch.enable_grad():
            ctx.output = block(x.detach().requires_grad_())
        return ctx.output.detach()
