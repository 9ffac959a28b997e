"""Activation checkpointing from scratch: run forward without saving, and again in backward.

With dropout in the block the second forward must draw the masks of the first. Ours puts the
random state back; a version that does not raises no error, and its gradients are wrong.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

TOKENS, H, LAYERS = 64, 32, 4
Function = Callable[[torch.Tensor], torch.Tensor]


class Checkpoint(torch.autograd.Function):
    """y = function(x), of which only x and the random states are kept.

    x must require a gradient, or autograd has no reason to call backward for what is in the
    function. In evaluation, call the function itself. Random states are those of the CPU and
    CUDA.
    """

    @staticmethod
    def forward(ctx, function: Function, preserve_rng: bool, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            raise ValueError("the input of a checkpoint must require a gradient")
        if preserve_rng and x.device.type not in ("cpu", "cuda"):
            raise ValueError("a checkpoint keeps the random states of the CPU and CUDA alone")
        kind, ctx.function, ctx.preserve_rng = x.device.type, function, preserve_rng
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.random_state = torch.get_rng_state()
        if x.is_cuda:
            ctx.device_state = torch.cuda.get_rng_state(x.device)
        ctx.save_for_backward(x)
        return function(x)  # no graph: grad mode is off inside forward

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output: torch.Tensor):
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():  # and put back afterwards
            if ctx.preserve_rng:
                torch.set_rng_state(ctx.random_state)
                if x.is_cuda:
                    torch.cuda.set_rng_state(ctx.device_state, x.device)
            with torch.autocast(*ctx.autocast):
                y = ctx.function(again)
        torch.autograd.backward(y, grad_output)  # adds to .grad of the parameters in it
        return None, None, again.grad


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, h]
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(nn.functional.dropout(hidden, 0.5))


def step(run: Callable[[Function, torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The gradient of all parameters as one vector, and the bytes that forward kept."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(DropoutBlock() for _ in range(LAYERS))
    x = torch.randn(TOKENS, H, requires_grad=True)
    kept = {}
    weights = {p.untyped_storage().data_ptr() for p in blocks.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in blocks:
            x = run(block, x)
    loss = (x - 1).square().mean()
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in blocks.parameters()])
    return gradient, sum(storage.nbytes() for storage in kept.values())


def main() -> None:
    plain, all_bytes = step(lambda block, x: block(x))
    random_state = torch.get_rng_state()
    ours, our_bytes = step(lambda block, x: Checkpoint.apply(block, True, x))
    assert torch.equal(torch.get_rng_state(), random_state)  # backward put it back
    theirs, _ = step(lambda block, x: torch_checkpoint(block, x, use_reentrant=False))
    wrong, _ = step(lambda block, x: Checkpoint.apply(block, False, x))
    off, _ = step(
        lambda block, x: torch_checkpoint(
            block, x, use_reentrant=False, preserve_rng_state=False
        )
    )
    unit = TOKENS * H * 4
    assert our_bytes == LAYERS * unit
    assert all_bytes == LAYERS * 13 * unit  # the input, and up, GELU's, mask, dropout's: 4 each
    print("kept for backward, in units of one block's input:")
    print(f"  without checkpoints ≈{all_bytes / unit:.0f}, with ours {our_bytes / unit:.0f}")
    assert torch.equal(ours, plain)
    assert torch.equal(theirs, plain)
    print("gradients: without checkpoints = ours = torch.utils.checkpoint, bit for bit")
    for name, gradient in (("ours", wrong), ("torch's", off)):
        error = (gradient - plain).norm() / plain.norm()
        assert error > 0.1
        print(f"{name} without the random state: no error raised, gradient off by ≈{error:.0%}")


if __name__ == "__main__":
    main()
