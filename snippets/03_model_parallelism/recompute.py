"""Recomputation in one stage: the bytes that each micro-batch keeps, and the extra FLOPs.

A stage of four transformer MLP blocks runs four micro-batches forward and then all of them
backward, as GPipe does. The program counts the bytes that are kept just before the first
backward, and the FLOPs of the whole step.
"""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

BLOCKS, M, TOKENS, H = 4, 4, 256, 64
FORWARD = 2 * 8 * H * H * TOKENS * BLOCKS * M  # FLOPs: two products of h x 4h


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # [tokens, h]


def step(blocks: nn.Sequential, inputs: torch.Tensor, unit: int) -> tuple[int, int]:
    """GPipe's step of one stage over inputs [m, tokens, h]: live bytes and FLOPs.

    `unit` blocks at a time are checkpointed, so that their input alone is kept; 0 is none.
    """
    held: dict[int, torch.UntypedStorage] = {}  # distinct storages, without weights
    weights = {p.untyped_storage().data_ptr() for p in blocks.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = (
                storage  # keeps it alive, so that its address is not used again
            )
        return tensor

    with FlopCounterMode(display=False) as counter:
        outputs = []
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for x in inputs:
                x = x.clone().requires_grad_()  # as received from the previous stage
                if unit == 0:
                    x = blocks(x)
                for i in range(0, len(blocks) if unit else 0, unit or 1):
                    x = checkpoint(blocks[i : i + unit], x, use_reentrant=False)
                outputs.append(x)
        live = sum(storage.nbytes() for storage in held.values())
        assert counter.get_total_flops() == FORWARD  # no backward has run yet
        held.clear()
        for y in outputs:
            y.backward(torch.ones_like(y))
    return live, counter.get_total_flops()


def main() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    inputs = torch.randn(M, TOKENS, H)
    bsh = TOKENS * H * 4  # bytes of a micro-batch between two blocks

    print("recomputed                 kept a micro-batch  FLOPs, in forwards  ratio")
    # the reference: all micro-batches together, as plain code
    x, base = inputs.flatten(0, 1), 0
    for block in blocks:
        hidden = nn.functional.gelu(x @ block.up.weight.T + block.up.bias)
        x = x + hidden @ block.down.weight.T + block.down.bias
    truth = torch.autograd.grad(x.sum(), list(blocks.parameters()))
    for name, unit, early_stop in [
        ("nothing", 0, True),
        ("each block", 1, True),
        ("each block, no early stop", 1, False),
        ("the stage", BLOCKS, True),
    ]:
        blocks.zero_grad()
        stop = contextlib.nullcontext() if early_stop else set_checkpoint_early_stop(False)
        with stop:
            live, flops = step(blocks, inputs, unit)
        base = base or flops
        for parameter, theirs in zip(blocks.parameters(), truth, strict=True):
            torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-4)
        print(f"{name:25}  {live / M / bsh:14.0f} bsh  ", end="")
        print(f"{flops / FORWARD:18.3f}  {flops / base:5.3f}")
    print("gradients equal; a whole second forward makes 4/3 = 1.333")


if __name__ == "__main__":
    main()
