"""Which calls of PyTorch move a tensor to another device, and which errors follow if none does.

The meta device takes the place of a GPU, so the mistakes and their messages appear on any
machine. Tensors on the meta device have a shape and no memory. Look at the attribute that stays
on the CPU when its module moves.
"""

import torch
from torch import nn


# --8<-- [start:block]
class Block(nn.Module):
    """A module with a parameter, a buffer, and a tensor that is only an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.scale = torch.ones(4)  # a plain attribute: to() does not move it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * self.scale + self.shift


# --8<-- [end:block]


def attempt(words: str, call) -> None:
    try:
        call()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        print(f"{words}\n  {type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError(f"{words}: no error")


def main() -> None:
    # --8<-- [start:basics]
    device = torch.accelerator.current_accelerator(check_available=True)
    device = device or torch.device("cpu")
    x = torch.arange(4.0, device=device)  # created there: no copy
    same = x.to(device)  # already there: the same tensor
    copy = x.to(device, copy=True)  # asked for a copy
    other = torch.device("meta")
    moved = x.to(other)  # a new tensor; x stays where it is
    # --8<-- [end:basics]
    home = same.device  # with its index: x is on cuda:0 where `device` is cuda
    print(f"to() its own device: the same tensor {same is x}, with copy=True {copy is x}")
    print(f"to() another: x is still on its device {x.device == home}, moved on {moved.device}")
    assert same is x and copy is not x and x.device == home and moved.device == other

    x.to(other)  # the mistake: the result is not used
    print(f"x.to(other) alone leaves x in place: {x.device == home}")
    block = Block()
    block.shift += 4
    torch.testing.assert_close(block(x.cpu()).detach(), x.cpu() + 5)  # all on one device
    block.to(other)  # a module is changed in place
    print(f"module.to(other): weight on {block.weight.device}, buffer on {block.shift.device}, "
          f"attribute on {block.scale.device}")  # fmt: skip
    assert block.weight.device == block.shift.device == other != block.scale.device

    cpu, there = torch.ones(4), torch.ones(4, device=other)
    attempt("two devices in one operator", lambda: cpu + there)
    attempt("an attribute that did not move", lambda: block(torch.ones(4, device=other)))
    attempt("numpy of a tensor that is not in host memory", there.numpy)
    attempt("data of a tensor that has none", lambda: there.to("cpu"))
    number = torch.tensor(2.0)
    print(f"a number (0-dim) may come from the CPU: {(there * number).device}")
    assert number.device == cpu.device != there.device


if __name__ == "__main__":
    main()
