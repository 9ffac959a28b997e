"""Selective activation checkpointing: keep what is expensive to compute, recompute the rest.

A layer can keep all activations, or only its input. Between the two extremes, it keeps the
results that need many FLOPs per byte and computes the others again. The program predicts and
counts memory and FLOPs for one transformer layer, in fp32 and without dropout. All four ways
give the same gradient, bit for bit.
"""

import weakref
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

S, B, H, A = 128, 2, 64, 4
aten = torch.ops.aten


class Live(TorchDispatchMode):
    """Counts the bytes of live storages that operators made, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, key).atexit = False
        self.peak = max(self.peak, self.now)
        return result

    def forget(self, key: int) -> None:
        size = self.sizes.pop(key)  # first: other threads may free storages too
        self.now -= size


def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(2, 3)) * (H // A) ** -0.5  # [b, a, s, s]
    return scores.softmax(-1) @ v  # [b, a, s, h/a]


class LayerAroundCore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.core = core

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).view(B, S, 3, A, H // A)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [b, a, s, h/a] each
        x = x + self.out(self.core(q, k, v).transpose(1, 2).reshape(B, S, H))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def check_layer(layer: nn.Module, a: int, x: torch.Tensor, *more: object) -> None:
    """Compare with torch's layer on x [b, s, h]. The weights of its norms come last."""
    h = x.shape[-1]
    library = nn.TransformerEncoderLayer(
        h, a, 4 * h, 0, "gelu", batch_first=True, norm_first=True
    )
    weights = list(layer.parameters())
    for theirs, ours in zip(library.parameters(), weights[4:] + weights[:4], strict=True):
        theirs.data.copy_(ours)
    torch.testing.assert_close(layer(x, *more), library(x))


# --8<-- [start:ways]
def keep_all(layer: LayerAroundCore, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def core_again(layer: LayerAroundCore, x: torch.Tensor) -> torch.Tensor:
    layer.core = partial(checkpoint, core, use_reentrant=False)
    return layer(x)


def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Keep the outputs of linear layers. Norms, GELU and the core of attention run again."""
    if op in {aten.mm.default, aten.addmm.default}:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def keep_products(layer: LayerAroundCore, x: torch.Tensor) -> torch.Tensor:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def keep_input(layer: LayerAroundCore, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


# --8<-- [end:ways]


def step(way) -> tuple[int, int, torch.Tensor]:
    """Bytes between forward and backward, the FLOPs of both, and all gradients."""
    torch.manual_seed(0)
    x = torch.randn(B, S, H, requires_grad=True)
    layer, again = LayerAroundCore(), LayerAroundCore()
    with Live() as live:
        for weight in layer.parameters():
            live.sizes[weight.untyped_storage()._cdata] = 0  # not an activation
        y = way(layer, x)
        live.sizes[x.untyped_storage()._cdata] = x.nbytes
        kept = sum(live.sizes.values()) - y.nbytes
        y.sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in (x, *layer.parameters())])
    with FlopCounterMode(display=False) as counter:  # it keeps tensors alive
        way(again, x).sum().backward()
    return kept, counter.get_total_flops(), gradient


def main() -> None:
    check_layer(LayerAroundCore(), A, torch.randn(B, S, H))
    sbh, scores = S * B * H, A * S * S * B
    linear = {"qkv": 6, "out": 2, "up": 8, "down": 8}  # FLOPs of forward, in sbh·h
    attend = 4 * S * sbh  # q·k and weights·v
    forward = sum(linear.values()) * sbh * H + attend
    last = linear["down"] * sbh * H  # recomputation stops before the last product
    rows = {
        "everything": (keep_all, 16 * sbh + scores, 3 * forward),
        "all but the scores": (core_again, 16 * sbh, 3 * forward + attend // 2),
        "linear layers' outputs": (keep_products, 10 * sbh, 3 * forward + attend),
        "the layer's input": (keep_input, sbh, 4 * forward - last),
    }
    truth = step(keep_all)[2]
    print(f"s = {S}, b = {B}, h = {H}, a = {A}: as/h = {A * S // H}")
    print(f"{'':25}kept, in sbh elements       FLOPs / forward's")
    print(f"{'kept':25}predicted   counted       predicted  counted")
    for name, (way, elements, flops) in rows.items():
        kept, counted, gradient = step(way)
        assert torch.equal(gradient, truth)
        assert counted == flops, name
        assert 0 <= kept / 4 - elements <= 4 * S * B, name  # mean and deviation of two norms
        print(
            f"{name:25}{elements / sbh:6.1f}{'≈' + format(kept / 4 / sbh, '.1f'):>12}"
            f"{flops / forward:15.2f}{counted / forward:11.2f}"
        )
    print("gradients equal: True")


if __name__ == "__main__":
    main()
