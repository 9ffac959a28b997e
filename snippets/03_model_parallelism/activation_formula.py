"""What a layer keeps for backward on each of t ranks, under TP and under TP with SP.

The formulas are from Korthikanti et al. (2022, Section 4.2): sbh(10 + 24/t + 5as/ht) bytes with
tensor parallelism, and sbh(34 + 5as/h)/t with sequence parallelism in addition, in 16 bits.
Four ranks form groups of one, two and four ranks. autograd reports every tensor that it saves,
and the program compares their bytes with the formulas. Draws activation_formula.svg.
"""

import os
import sys
from contextlib import AbstractContextManager

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

B, S, H, HEADS = 1, 256, 128, 8  # as/h = 16, the ratio of GPT-3
RATIO = HEADS * S / H
FORMULAS = {  # bytes per layer and rank, in sbh; fused attention has no term with as/h
    "TP": lambda t, ratio: 10 + 24 / t + 5 * ratio / t,
    "TP + SP": lambda t, ratio: (34 + 5 * ratio) / t,
}


def gather(shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s/t, h] -> [b, s, h]"""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def reduce_scatter(term: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """[b, s, h] -> [b, s/t, h]"""
    outgoing = torch.stack(term.chunk(dist.get_world_size(group), dim=1))
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.sum(dim=0)


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, group):
        total = term.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient, None


class GatherTokensInGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard, group):
        ctx.group = group
        return gather(shard, group)

    @staticmethod
    def backward(ctx, gradient):
        return ScatterSumInGroup.apply(gradient, ctx.group), None


class ScatterSumInGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term, group):
        ctx.group = group
        return reduce_scatter(term, group)

    @staticmethod
    def backward(ctx, gradient):
        return GatherTokensInGroup.apply(gradient, ctx.group), None


class GatheredLinear(torch.autograd.Function):
    """g and the product together. Keeps this rank's tokens, and gathers again in backward."""

    @staticmethod
    def forward(ctx, shard, weight, bias, group):
        ctx.save_for_backward(shard, weight)  # [b, s/t, h], and not [b, s, h]
        ctx.group = group
        return F.linear(gather(shard, group), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        shard, weight = (x.to(gradient.dtype) for x in ctx.saved_tensors)  # autocast's
        rows = gradient.flatten(0, 1)  # [bs, out]
        weight_gradient = rows.T @ gather(shard, ctx.group).flatten(0, 1)
        bias_gradient = rows.sum(0) if ctx.needs_input_grad[2] else None
        shard_gradient = reduce_scatter(gradient @ weight, ctx.group)
        return shard_gradient, weight_gradient, bias_gradient, None


class Layer(nn.Module):
    """One rank's part of a transformer layer in bf16 with the paper's three dropouts."""

    def __init__(self, group: dist.ProcessGroup, sequence: bool, again: bool, fused: bool):
        super().__init__()
        t = dist.get_world_size(group)
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.out = nn.Linear(H, 3 * H // t), nn.Linear(H // t, H, bias=False)
        self.up, self.down = nn.Linear(H, 4 * H // t), nn.Linear(4 * H // t, H, bias=False)
        self.group, self.sequence, self.again, self.fused = group, sequence, again, fused
        self.heads = HEADS // t
        self.bfloat16()

    def column(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            return GatheredLinear.apply(x, layer.weight, layer.bias, self.group)
        # f of TP alone is left out, because it keeps nothing and only its backward sends
        return layer(GatherTokensInGroup.apply(x, self.group) if self.sequence else x)

    def row(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        term = layer(x)
        if self.sequence:
            return ScatterSumInGroup.apply(term, self.group)
        return SumOverGroup.apply(term, self.group)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.1, True)[0]  # a byte for each element, as on a GPU

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.column(self.qkv, x).view(B, S, 3, self.heads, H // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # [b, a/t, s, h/a] each
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            scores = q @ k.transpose(2, 3) / (H // HEADS) ** 0.5  # [b, a/t, s, s]
            mixed = self.dropout(scores.softmax(dim=-1)) @ v
        return self.dropout(self.row(self.out, mixed.transpose(1, 2).flatten(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        hidden = F.gelu(self.column(self.up, self.norm2(x)))
        return x + self.dropout(self.row(self.down, hidden))


class SavedBytes:
    """Bytes of the storages that autograd keeps, without parameters and small statistics."""

    def __init__(self, module: nn.Module) -> None:
        self.seen = {p.untyped_storage().data_ptr() for p in module.parameters()}
        self.alive: list[torch.UntypedStorage] = []  # so that no address is reused
        self.bytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.seen:
            self.seen.add(storage.data_ptr())
            self.alive.append(storage)
            if tensor.numel() > S * B * H // 8:  # not the means, deviations and log-sums
                self.bytes += storage.nbytes()
        return tensor

    def watch(self) -> AbstractContextManager:
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)


def measure(group: dist.ProcessGroup, sequence: bool, again: bool, fused: bool):
    """Bytes kept by one layer in sbh, and the gradient of its input."""
    torch.manual_seed(0)  # the same weights, input and masks in every case
    layer = Layer(group, sequence, again, fused)
    tokens = S // dist.get_world_size(group) if sequence else S
    x = torch.randn(B, tokens, H, dtype=torch.bfloat16, requires_grad=True)
    saved = SavedBytes(layer)
    with saved.watch():
        output = layer(x)
    output.sum().backward()
    return saved.bytes / (S * B * H), [x.grad, *(p.grad for p in layer.parameters())]


def check(group: dist.ProcessGroup) -> None:
    """Check the sums over the group in closed form, and explicit against fused attention."""
    t, rank = dist.get_world_size(group), dist.get_rank(group)
    term = torch.arange(B * S * H).view(B, S, H)
    total, mine = t * (t + 1) // 2 * term, (rank + 1) * term
    assert SumOverGroup.apply(mine, group).equal(total)
    assert ScatterSumInGroup.apply(mine, group).equal(total.chunk(t, dim=1)[rank])
    explicit, fused = (Layer(group, False, False, fused).float() for fused in (False, True))
    fused.load_state_dict(explicit.state_dict())
    explicit.dropout = fused.dropout = lambda x: x
    x = torch.randn(B, S, H)
    torch.testing.assert_close(explicit.attend(x), fused.attend(x), rtol=1e-4, atol=1e-5)


def draw(points: dict[tuple[str, bool], list[float]], sizes: list[int]) -> None:
    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "activations", "font.size": 12}
    figure, axes = plt.subplots(figsize=(7, 4))
    line = [1, 2, 4, 8, 16]
    for fused, label, colours in (
        (False, "", ("#c2410c", "#0b6e99")),
        (True, ", fused", ("#7c3aed", "#15803d")),
    ):
        for (name, formula), colour in zip(FORMULAS.items(), colours, strict=True):
            values = [formula(t, 0 if fused else RATIO) for t in line]
            axes.plot(line, values, color=colour, linewidth=2)
            axes.plot(sizes, points[name, fused], "o", color=colour, markersize=7)
            axes.text(17, values[-1], name + label, color=colour, va="center")
    axes.axhline(10, color="#52525b", linestyle=":", linewidth=1.2)
    axes.text(1, 9.2, "TP: never below 10", color="#52525b", va="top")
    axes.text(1, 2.4, "● counted, — formula", color="#52525b")
    axes.set(xscale="log", yscale="log", xlabel="tensor-parallel ranks t")
    axes.set_ylabel("bytes per layer and rank, in sbh")
    axes.set_xticks(line, [str(t) for t in line])
    axes.set_yticks([2, 5, 10, 20, 50, 100], ["2", "5", "10", "20", "50", "100"])
    axes.minorticks_off()
    axes.set_xlim(0.9, 48)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig("activation_formula.svg", transparent=True, metadata={"Date": None})


def published() -> None:
    """All layers on the first of p stages, which holds p micro-batches of L/p layers."""
    print("L layers at t = 8, GB per rank     TP   + SP   + scores recomputed")
    for name, b, h, a, layers in (
        ("22B, b = 4", 4, 6144, 64, 48),
        ("530B", 1, 20480, 128, 105),
    ):
        unit, ratio = 2048 * b * h * layers / 1e9, a * 2048 / h
        tp, sp = (unit * formula(8, ratio) for formula in FORMULAS.values())
        print(f"  {name:28} {tp:6.1f} {sp:6.1f} {unit * 34 / 8:21.1f}")


def main() -> None:
    if os.environ.get("WORLD_SIZE") not in ("1", "2", "4"):
        sys.exit("start this with: torchrun --nproc-per-node=4 activation_formula.py")
    dist.init_process_group("gloo")  # counting bytes needs no accelerator
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [t for t in (1, 2, 4) if t <= world]
    points: dict[tuple[str, bool], list[float]] = {}
    if rank == 0:
        print(f"bytes a layer keeps on a rank, in sbh; as/h = {RATIO:.0f}")
        print(
            "attention   t      TP  formula   TP + SP  and gathered again  formula", flush=True
        )
    for fused in (False, True):
        for t in sizes:
            group, _ = dist.new_subgroups(t)
            check(group)
            tp, _ = measure(group, sequence=False, again=False, fused=fused)
            naive, gradient = measure(group, sequence=True, again=False, fused=fused)
            sp, gradient_again = measure(group, sequence=True, again=True, fused=fused)
            torch.testing.assert_close(gradient_again, gradient)
            ratio = 0 if fused else RATIO
            expected = [formula(t, ratio) for formula in FORMULAS.values()]
            assert [tp, sp] == expected, (tp, sp, expected)
            points.setdefault(("TP", fused), []).append(tp)
            points.setdefault(("TP + SP", fused), []).append(sp)
            if rank == 0:
                kind = "fused" if fused else "explicit"
                print(f"{kind:10} {t:2} {tp:7.2f} {expected[0]:8.2f}", end=" ")
                print(f"{naive:9.2f} {sp:19.2f} {expected[1]:8.2f}")
    if rank == 0:
        published()
        draw(points, sizes)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
