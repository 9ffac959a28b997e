# ruff: noqa: F821 (names of the lab)
"""Step 6: x as an attribute"""

STEP, HINT = 6, "save_for_backward"


class Checkpoint:
    @staticmethod
    def forward(ctx, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block, ctx.state = block, random_state(x.device)
        ctx.save_for_backward(x)
        ctx.x = x
        return block(x)
