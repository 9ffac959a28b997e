"""Sequence parallelism: each rank computes norms and residuals for its own tokens only.

Tensor parallelism copies at one end of a cut region and all-reduces at the other end. Sequence
parallelism (Korthikanti et al., 2022) replaces the copy by g, which gathers the tokens in
forward and reduce-scatters in backward. It replaces the all-reduce by ḡ, which does the
opposite. The program builds both blocks and compares them with the block on one rank, which is
compared with a plain calculation, one head at a time. It counts collectives and bytes.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn import functional as F

B, S, H, HEADS = 2, 48, 192, 12  # 1, 2, 3 and 4 ranks divide the heads and the sequence
calls: Counter[str] = Counter()


def counted_all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    calls["all-reduce"] += 1
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def counted_all_gather(shard: torch.Tensor) -> torch.Tensor:
    """[b, s/t, h] -> [b, s, h]"""
    calls["all-gather"] += 1
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim=1)


def counted_reduce_scatter(term: torch.Tensor) -> torch.Tensor:
    """[b, s, h] -> [b, s/t, h], with an all-to-all, because gloo's own would send more bytes"""
    calls["reduce-scatter"] += 1
    outgoing = torch.stack(term.chunk(dist.get_world_size(), dim=1))  # [t, b, s/t, h]
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    return incoming.sum(dim=0)


class GatherTokens(torch.autograd.Function):
    """g: all-gather. In backward, the gradients of a token are summed on its own rank."""

    @staticmethod
    def forward(ctx, shard):
        return counted_all_gather(shard)

    @staticmethod
    def backward(ctx, gradient):
        return ScatterSum.apply(gradient)


class ScatterSum(torch.autograd.Function):
    """ḡ: sum of the terms, for this rank's tokens. In backward, an all-gather."""

    @staticmethod
    def forward(ctx, term):
        return counted_reduce_scatter(term)

    @staticmethod
    def backward(ctx, gradient):
        return GatherTokens.apply(gradient)


class CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, term):
        return counted_all_reduce(term)

    @staticmethod
    def backward(ctx, gradient):
        return CopyToRanks.apply(gradient)


class Block(nn.Module):
    """A block with two cut regions. Before `cut`, `enter` and `leave` are identities."""

    cut_by_columns, cut_by_rows = ("q", "k", "v", "up"), ("o", "down")

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.q, self.k, self.v, self.o = (nn.Linear(H, H, bias=False) for _ in range(4))
        self.up = nn.Linear(H, 4 * H, bias=False)
        self.down = nn.Linear(4 * H, H, bias=False)
        self.enter = self.leave = lambda x: x

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            F.linear(x, layer.weight).unflatten(2, (-1, H // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )  # [b, a/t, s, h/a]: all tokens of some heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.o.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, h], or [b, s/t, h] where the tokens are cut"""
        x = x + self.leave(self.attend(self.enter(self.norm1(x))))
        hidden = F.gelu(F.linear(self.enter(self.norm2(x)), self.up.weight))
        return x + self.leave(F.linear(hidden, self.down.weight))

    def cut(self, enter, leave) -> "Block":
        """Keep only this rank's part of the six matrices. The norms stay whole."""
        rank, t = dist.get_rank(), dist.get_world_size()
        for dim, names in enumerate((self.cut_by_columns, self.cut_by_rows)):
            for name in names:
                layer = getattr(self, name)
                part = layer.weight.detach().chunk(t, dim)[rank]
                layer.weight = nn.Parameter(part.clone())
        self.enter, self.leave = enter.apply, leave.apply
        return self


def by_hand(x: torch.Tensor, w: dict[str, torch.Tensor]) -> torch.Tensor:
    """The block again, from plain products and one head at a time. [b, s, h] -> [b, s, h]"""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        variance = x.var(-1, keepdim=True, correction=0)
        scaled = (x - x.mean(-1, keepdim=True)) / (variance + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    normed, width = norm(x, "norm1"), H // HEADS
    future = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
    heads = []
    for q, k, v in zip(*(linear(normed, n).split(width, -1) for n in "qkv"), strict=True):
        scores = (q @ k.mT / width**0.5).masked_fill(future, -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    x = x + linear(torch.cat(heads, -1), "o")
    u = linear(norm(x, "norm2"), "up")
    return x + linear(u / 2 * (1 + torch.erf(u / 2**0.5)), "down")


def sum_norm_gradients(block: Block) -> None:
    """Sum the gradients of the norms, because each rank computed them for its own tokens."""
    gradients = [p.grad for norm in (block.norm1, block.norm2) for p in norm.parameters()]
    flat = torch.cat(gradients)  # 4h elements for the whole block, in one all-reduce
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split(H), strict=True):
        gradient.copy_(total)


def check(block: Block, whole: Block) -> None:
    rank, t = dist.get_rank(), dist.get_world_size()
    for (name, ours), truth in zip(block.named_parameters(), whole.parameters(), strict=True):
        part = truth.grad
        if ours.shape != truth.shape:
            part = part.chunk(t, 0 if name.split(".")[0] in Block.cut_by_columns else 1)[rank]
        torch.testing.assert_close(ours.grad, part, rtol=1e-4, atol=1e-4)


def bytes_written() -> int | None:
    """Bytes that this process has passed to write calls, also of sockets, or None."""
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None  # NCCL does not send through the kernel
    return int(counters.read_text().split("wchar:")[1].split()[0])


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def main() -> None:
    if HEADS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the {HEADS} heads")
    device = init_distributed()
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = Block().to(device)
    for norm in (whole.norm1, whole.norm2):  # not the ones and zeros of a new norm
        nn.init.normal_(norm.weight, 1.0, 0.1)
        nn.init.normal_(norm.bias, 0.0, 0.1)
    weights = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    x = torch.randn(B, S, H).to(device)
    x_whole = x.clone().requires_grad_()
    expected = whole(x_whole)
    torch.testing.assert_close(expected, by_hand(x, weights), rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()

    if rank == 0:
        print(f"t = {t}, bsh = {B * S * H:,} elements, fp32")
    normed: list[torch.Size] = []  # the shapes of the norms' outputs
    for name, enter, leave, tokens in (
        ("TP", CopyToRanks, SumOverRanks, slice(None)),
        ("TP + SP", GatherTokens, ScatterSum, slice(rank * S // t, (rank + 1) * S // t)),
    ):
        block = Block().to(device)
        block.load_state_dict(weights)
        block.cut(enter, leave)
        for norm in (block.norm1, block.norm2):
            norm.register_forward_hook(lambda norm, inputs, out: normed.append(out.shape))
        mine = x[:, tokens].clone().requires_grad_()  # [b, s, h] or [b, s/t, h]
        calls.clear(), normed.clear()
        dist.barrier()
        begin = bytes_written()
        output = block(mine)
        output.square().sum().backward()
        end = bytes_written()
        assert normed == [mine.shape, mine.shape]  # a rank norms its own tokens only
        if name == "TP + SP":
            sum_norm_gradients(block)
        torch.testing.assert_close(output, expected[:, tokens])
        torch.testing.assert_close(mine.grad, x_whole.grad[:, tokens], rtol=1e-4, atol=1e-4)
        check(block, whole)
        if rank == 0:
            counted = ", ".join(f"{count} {call}s" for call, count in sorted(calls.items()))
            parts = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
            factor = sum(parts[call] * count for call, count in calls.items())
            formula = factor * (t - 1) / t * 4 * B * S * H / 1024
            sent = "not here" if begin is None else f"≈{(end - begin) / 1024:.0f} KiB"
            # headers and other output of this process are a few KiB. One more call sends 36 KiB
            assert begin is None or 0 <= (end - begin) / 1024 - formula < 4 * t + 8
            print(f"{name:8} residual stream {tuple(output.shape)}: equal, with all gradients")
            print(f"         {counted}")
            print(f"         {factor} (t-1)/t bsh = {formula:.0f} KiB, sent by a rank {sent}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
