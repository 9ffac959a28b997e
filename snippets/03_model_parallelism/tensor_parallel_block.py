"""A transformer block cut inside its layers, with Megatron's conjugate operators f and g.

Shoeybi et al. (2019) cut the first matrix of attention and of the MLP by columns, and the
second by rows. f copies in forward and all-reduces in backward. g does the opposite. The output
and all gradients equal those of the whole block, which is compared with a plain calculation,
one head at a time. The program counts collectives and bytes.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn import functional as F

B, S, H, HEADS = 2, 64, 192, 12  # 1, 2, 3 and 4 ranks divide the heads
elements_reduced: list[int] = []  # one entry for each all-reduce


def all_reduce(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    elements_reduced.append(total.numel())
    dist.all_reduce(total)
    return total


class CopyToRanks(torch.autograd.Function):
    """f, where a cut region begins: all ranks read x, so its gradient is a sum over them."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


class SumOverRanks(torch.autograd.Function):
    """g, where a cut region ends: a sum over ranks. Its gradient is that of every term."""

    @staticmethod
    def forward(ctx, term):
        return all_reduce(term)

    @staticmethod
    def backward(ctx, gradient):
        return CopyToRanks.apply(gradient)


def shard(whole: nn.Parameter, dim: int) -> nn.Parameter:
    """Return this rank's part of a weight or bias as a parameter, frozen if `whole` is."""
    part = whole.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
    return nn.Parameter(part.clone(), whole.requires_grad)


class ColumnParallel(nn.Module):
    """h -> 4h/t. nn.Linear stores [out, in], so dimension 0 of the weight is cut."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = shard(whole.weight, 0)
        self.bias = None if whole.bias is None else shard(whole.bias, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RowParallel(nn.Module):
    """4h/t -> h: a term on each rank, then g. The bias is added once, after the sum."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__()
        self.weight = shard(whole.weight, 1)
        self.bias = copy.deepcopy(whole.bias)  # whole, on every rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = SumOverRanks.apply(F.linear(x, self.weight))
        return total if self.bias is None else total + self.bias


class Block(nn.Module):
    """Pre-norm attention and MLP, without any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        # [b, s, h/t] -> [b, a/t, s, h/a]: whole heads, so the ranks exchange nothing here
        q, k, v = (
            layer(x).unflatten(2, (-1, H // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.enter(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.enter(self.norm2(x)))))


class TensorParallelBlock(Block):
    """The same block with its six matrices cut. The norms stay whole on every rank."""

    def __init__(self, whole: Block) -> None:
        super().__init__()
        self.norm1.load_state_dict(whole.norm1.state_dict())
        self.norm2.load_state_dict(whole.norm2.state_dict())
        for name in ("q", "k", "v", "up"):
            setattr(self, name, ColumnParallel(getattr(whole, name)))
        for name in ("o", "down"):
            setattr(self, name, RowParallel(getattr(whole, name)))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return CopyToRanks.apply(x)


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


def shard_like(ours: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of `whole` that this rank must have. It compares the shapes."""
    for dim, (mine, all_of_it) in enumerate(zip(ours.shape, whole.shape, strict=True)):
        if mine != all_of_it:
            return whole.tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
    return whole


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
    torch.manual_seed(0)  # the same block and the same input on every rank
    whole = Block().to(device)
    for norm in (whole.norm1, whole.norm2):  # not the ones and zeros of a new norm
        nn.init.normal_(norm.weight, 1.0, 0.1)
        nn.init.normal_(norm.bias, 0.0, 0.1)
    x = torch.randn(B, S, H).to(device)
    ours = TensorParallelBlock(whole).to(device)
    x_whole, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = whole(x_whole)
    weights = {name: weight.detach() for name, weight in whole.named_parameters()}
    torch.testing.assert_close(expected, by_hand(x, weights), rtol=1e-4, atol=1e-4)
    expected.square().sum().backward()

    dist.barrier()
    marks = [bytes_written()]
    # --8<-- [start:traced]
    output = ours(x_ours)
    in_forward = len(elements_reduced)
    marks.append(bytes_written())
    output.square().sum().backward()
    # --8<-- [end:traced]
    marks.append(bytes_written())

    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(x_ours.grad, x_whole.grad, rtol=1e-4, atol=1e-4)
    gradients = dict(whole.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(gradients)
    for name, parameter in ours.named_parameters():
        part = shard_like(parameter.grad, gradients[name].grad)
        torch.testing.assert_close(parameter.grad, part, rtol=1e-4, atol=1e-3)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes  # no view of the whole

    assert set(elements_reduced) == {B * S * H}
    if rank == 0:
        kept, full = (sum(p.numel() for p in block.parameters()) for block in (ours, whole))
        heads = len(ours.q.weight) // (H // HEADS)
        print(f"t = {t}: {kept:,} of {full:,} parameters and {heads} of {HEADS} heads a rank")
        print(f"every all-reduce has bsh = {B * S * H:,} elements")
        formula = 2 * 2 * (t - 1) / t * 4 * B * S * H / 1024  # two all-reduces in 4 bytes
        print(f"           all-reduces   KiB sent by a rank: formula {formula:.0f}")
        calls = in_forward, len(elements_reduced) - in_forward
        for phase, count in enumerate(calls):
            before, after = marks[phase : phase + 2]
            sent = "not here" if before is None else f"≈{(after - before) / 1024:.0f}"
            # headers and other output of this process are a few KiB
            assert before is None or 0 <= (after - before) / 1024 - formula < 0.2 * formula + 16
            print(f"  {('forward', 'backward')[phase]:8}{count:13}   counted {sent}")
        count = len(gradients)
        print(f"output, gradient of the input and {count} gradients of parameters: equal")

    # the second derivatives, too, here of frozen layers without biases
    linears = [nn.Linear(H, H, bias=False).to(device).requires_grad_(False) for _ in range(2)]
    cut = [ColumnParallel(linears[0]), RowParallel(linears[1])]
    assert not any(p.requires_grad for layer in cut for p in layer.parameters())
    second: list[torch.Tensor] = []
    for enter, (up, down) in ((whole.enter, linears), (ours.enter, cut)):
        loss = down(F.gelu(up(enter(x_ours)))).square().sum()
        (slope,) = torch.autograd.grad(loss, x_ours, create_graph=True)
        second += torch.autograd.grad(slope.square().sum(), x_ours)
    torch.testing.assert_close(*second, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
