# ruff: noqa: F821 (names of the lab)
"""Step 6: the state after the first forward"""

STEP, HINT = 6, "mask_again"


class Checkpoint:
    @staticmethod
    def forward(ctx, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        output = block(x)
        ctx.state = random_state(x.device)
        return output
