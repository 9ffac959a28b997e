"""Activation checkpointing from scratch: keep only the input, and compute the rest twice.

If the block contains dropout, the second forward pass must draw the same masks as the first
one. Our class therefore restores the random state. Without this step no error is raised, and
the gradients are wrong.

Look at the last two lines: both wrong versions run without an error.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

TOKENS, H, LAYERS = 64, 32, 4
Function = Callable[[torch.Tensor], torch.Tensor]


class Checkpoint(torch.autograd.Function):
    """Compute y = function(x). Until backward, keep only x and the random states.

    x must require a gradient: otherwise autograd does not call backward for the parameters
    inside the function. Without a backward pass, call the function itself. The class restores
    the random states of the CPU and of CUDA, and it has no second derivative.
    """

    @staticmethod
    def forward(ctx, function: Function, preserve_rng: bool, x: torch.Tensor) -> torch.Tensor:
        if not x.requires_grad:
            raise ValueError("the input of a checkpoint must require a gradient")
        if preserve_rng and x.device.type not in ("cpu", "cuda"):
            raise ValueError("a checkpoint restores the random states of the CPU and CUDA only")
        kind, ctx.function, ctx.preserve_rng = x.device.type, function, preserve_rng
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        ctx.random_state = torch.get_rng_state()
        if x.is_cuda:
            ctx.device_state = torch.cuda.get_rng_state(x.device)
        ctx.save_for_backward(x)
        return function(x)  # no graph: grad mode is off inside forward

    @staticmethod
    def backward(ctx, grad_output: torch.Tensor):
        if torch.is_grad_enabled():  # somebody called backward with create_graph=True
            raise RuntimeError("this checkpoint has no second derivative")
        (x,) = ctx.saved_tensors
        again = x.detach().requires_grad_()
        devices = [x.device] if x.is_cuda else []
        with torch.random.fork_rng(devices), torch.enable_grad():  # restored at the end
            if ctx.preserve_rng:
                torch.set_rng_state(ctx.random_state)
                if x.is_cuda:
                    torch.cuda.set_rng_state(ctx.device_state, x.device)
            with torch.autocast(*ctx.autocast):
                y = ctx.function(again)
        torch.autograd.backward(y, grad_output)  # adds to .grad of the parameters
        return None, None, again.grad


class DropoutBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [tokens, h]
        hidden = nn.functional.gelu(self.up(x))
        return x + self.down(nn.functional.dropout(hidden, 0.5))


def step(run: Callable[..., torch.Tensor], bf16: bool = False) -> tuple[torch.Tensor, int]:
    """The gradient of all parameters as one vector, and the bytes saved for backward."""
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

    context = torch.autocast("cpu", torch.bfloat16, enabled=bf16)  # left before backward
    with saved_tensors_hooks(pack, lambda tensor: tensor), context:
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
    assert torch.equal(torch.get_rng_state(), random_state)  # backward restored it
    theirs, their_bytes = step(lambda block, x: torch_checkpoint(block, x, use_reentrant=False))
    wrong, _ = step(lambda block, x: Checkpoint.apply(block, False, x))
    off, _ = step(
        lambda block, x: torch_checkpoint(
            block, x, use_reentrant=False, preserve_rng_state=False
        )
    )
    unit = TOKENS * H * 4
    assert our_bytes == LAYERS * unit and their_bytes < all_bytes / 4
    assert all_bytes == LAYERS * 13 * unit  # the input, and 4 each: up, GELU, the mask, dropout
    for x, expected in (
        (torch.ones(1, requires_grad=True), "no second derivative"),
        (torch.ones(1), "must require a gradient"),
        (torch.ones(1, device="meta", requires_grad=True), "of the CPU and CUDA only"),
    ):
        try:
            torch.autograd.grad(Checkpoint.apply(torch.square, True, x), x, create_graph=True)
            raise AssertionError("an error was expected: " + expected)
        except (RuntimeError, ValueError) as error:
            assert expected in str(error)
    layer, x = nn.Linear(1, 1), torch.ones(1, requires_grad=True)
    (gradient,) = torch.autograd.grad(Checkpoint.apply(layer, True, x), x)
    # This class adds to .grad even under autograd.grad.
    assert gradient == layer.weight and layer.weight.grad == 1
    plain16, _ = step(lambda block, x: block(x), bf16=True)
    ours16, _ = step(lambda block, x: Checkpoint.apply(block, True, x), bf16=True)
    assert torch.equal(ours16, plain16) and not torch.equal(plain16, plain)
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
