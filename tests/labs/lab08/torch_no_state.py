# ruff: noqa: F821 (names of the lab)
"""Step 6: the state is not kept"""

STEP, HINT = 6, "torch_mask"


def checkpoint_by_torch(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The same by torch.utils.checkpoint, in the variant that is not reentrant."""
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
