"""This program lists every cast that autocast makes in one transformer block.

A dispatch mode is called below autocast, so it sees the casts that autocast inserted, and each
operator with the types in which it really runs. Views and copies of one type are left out.

Look at the products, which are addmm, bmm and mm: all their types are bf16, in forward and in
backward. Then look at "add", where the residual stream stays fp32.
"""

import copy
from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

B, S, H, HEADS, V = 2, 8, 32, 4, 64
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
PRODUCTS = {"addmm", "bmm", "mm"}
QUIET = {"view", "_unsafe_view", "reshape", "t", "transpose", "expand", "detach", "unbind"}
QUIET |= {"split", "clone", "ones_like", "select_backward", "stack", "permute", "squeeze"}


class Block(nn.Module):
    """Pre-norm attention and MLP, then a head and its loss: [b, s, h] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(2))
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down, self.head = (
            nn.Linear(H, 4 * H),
            nn.Linear(4 * H, H),
            nn.Linear(H, V),
        )

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norms[0](x)).view(B, S, 3, HEADS, H // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, a, s, h/a]
        weights = F.softmax(q @ k.transpose(-1, -2) * (H // HEADS) ** -0.5, dim=-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(B, S, H))
        x = x + self.down(F.gelu(self.up(self.norms[1](x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Trace(TorchDispatchMode):
    """Collect one line per operator: name, types of the inputs -> type of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.casts: list[tuple[torch.Size, torch.dtype]] = []  # shape and type of each result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [NAMES[a.dtype] for a in tree_leaves(args) if is_float(a)]
        first = next(r for r in tree_leaves(result) if r is not None)
        if name in QUIET:
            assert not given or set(given) == {NAMES[first.dtype]}, "a cast is hidden"
        else:
            arrow = f"{' '.join(given)} -> {NAMES[first.dtype]}" if is_float(first) else ""
            self.lines.append(f"{'cast' if name == '_to_copy' else name:28}{arrow}")
            self.casts += [(first.shape, first.dtype)] * (name == "_to_copy")
        return result


def is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def show(title: str, lines: list[str]) -> None:
    """Print the lines; equal lines in a row are printed once, with a count."""
    casts = sum(line.startswith("cast") for line in lines)
    print(f"{title}: {len(lines)} operators, {casts} of them casts")
    index = 0
    while index < len(lines):
        run = 1
        while index + run < len(lines) and lines[index + run] == lines[index]:
            run += 1
        print(f"  {lines[index]}{f'   × {run}' if run > 1 else ''}")
        index += run


def by_library(block: Block, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss if torch's own layer replaces attention and MLP."""
    layer = nn.TransformerEncoderLayer(
        H, HEADS, 4 * H, 0.0, "gelu", batch_first=True, norm_first=True, device=x.device
    )
    parts = nn.ModuleList([block.qkv, block.out, block.up, block.down, *block.norms])
    for theirs, ours in zip(layer.parameters(), parts.parameters(), strict=True):
        theirs.data.copy_(ours.data)
    return F.cross_entropy(block.head(layer(x)).flatten(0, 1), targets.flatten())


def main() -> None:
    found = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if found else torch.device("cpu")
    torch.manual_seed(0)
    block = Block().to(device)
    x = torch.randn(B, S, H, device=device)
    targets = torch.randint(0, V, (B, S), device=device)
    with Trace() as forward, torch.autocast(device.type, dtype=torch.bfloat16):
        loss = block(x, targets)
    with Trace() as backward:  # outside autocast: backward runs in the types of forward
        loss.backward()
    short = copy.deepcopy(block).bfloat16(), x.bfloat16()
    with Trace() as alone:
        short[0](short[1], targets)
    assert not alone.casts  # the block itself contains no cast
    show("forward", forward.lines)
    show("backward", backward.lines)
    assert all(p.grad.dtype == torch.float32 for p in block.parameters())
    products = [t for t in forward.lines + backward.lines if t.split()[0] in PRODUCTS]
    assert len(products) == 7 + 14 and not any("fp32" in line for line in products)
    sums = [line.split(maxsplit=1)[1] for line in forward.lines if line.startswith("add ")]
    assert sums == ["fp32 bf16 -> fp32"] * 2  # both residual sums
    linear = [p.shape for name, p in block.named_parameters() if "norm" not in name]
    for trace, dtype in ((forward, torch.bfloat16), (backward, torch.float32)):
        shapes = Counter(shape for shape, to in trace.casts if to == dtype)
        assert Counter(linear) <= shapes  # each weight and bias once, and in backward its .grad
    torch.testing.assert_close(block(x, targets), by_library(block, x, targets))
    torch.testing.assert_close(loss, block(x, targets), rtol=0.02, atol=0)
    print("every .grad is fp32, as its parameter")


if __name__ == "__main__":
    main()
