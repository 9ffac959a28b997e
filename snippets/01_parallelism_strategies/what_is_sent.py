"""Counts the bytes that data, sharded, tensor and pipeline parallelism send in one step.

Each strategy computes one forward and one backward pass of x + W₂·gelu(W₁x), each with its own
cut of the work. The result is compared with that of one process that has all data and weights.
The bytes that a rank writes to its sockets are compared with the formula. With S = 4Ψ bytes of
parameters and A = 4bsh bytes of activations, the formulas are

    data      one all-reduce of the gradients                   2(n-1)/n · S
    sharded   two gathers of parameters, a gradient reduction   3(n-1)/n · S
    tensor    an all-reduce in forward and one in backward      2 · 2(n-1)/n · A
    pipeline  an activation forward, a gradient backward        A to each neighbour
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

B, SEQUENCE, H = 2, 96, 192  # 4H is divisible by 1, 2, 3 and 4 ranks
KIB = 1024


class CopyToRanks(torch.autograd.Function):
    """f: a copy in forward, because every rank has x, and an all-reduce in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


class SumOverRanks(torch.autograd.Function):
    """g: an all-reduce in forward, and a copy in backward: all ranks have the gradient."""

    @staticmethod
    def forward(ctx, term):
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return CopyToRanks.apply(gradient)


def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return x + F.gelu(x @ w1) @ w2


def data_parallel(w1: torch.Tensor, w2: torch.Tensor, batches: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    ours = [w.clone().requires_grad_() for w in (w1, w2)]
    output = block(batches[rank], *ours)
    assert output.shape == (B, SEQUENCE, H)  # its own batch, no more
    output.square().mean().backward()
    flat = torch.cat([w.grad.flatten() for w in ours]) / n
    dist.all_reduce(flat)
    torch.testing.assert_close(flat, whole_gradient(w1, w2, batches))


def sharded(w1: torch.Tensor, w2: torch.Tensor, batches: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = torch.cat([w1.flatten(), w2.flatten()]).chunk(n)
    mine = shards[rank].clone()  # this rank keeps only this shard

    def gather() -> tuple[torch.Tensor, torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in range(n)]
        dist.all_gather(parts, mine)
        first, second = torch.cat(parts).split([w1.numel(), w2.numel()])
        return first.view_as(w1), second.view_as(w2)

    x = batches[rank]
    assert x.shape == (B, SEQUENCE, H)  # its own batch, no more
    with torch.no_grad():
        hidden = x @ gather()[0]  # forward, then the gathered parameters are freed
    full = [w.clone().requires_grad_() for w in gather()]  # gathered again for backward
    torch.testing.assert_close(x @ full[0], hidden)
    block(x, *full).square().mean().backward()
    outgoing = torch.cat([w.grad.flatten() for w in full]) / n
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)  # a reduce-scatter: exchange chunks, then add
    reduced = incoming.view(n, -1).sum(dim=0)
    torch.testing.assert_close(reduced, whole_gradient(w1, w2, batches).chunk(n)[rank])


def tensor_parallel(w1: torch.Tensor, w2: torch.Tensor, batches: torch.Tensor) -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    columns = w1.chunk(n, dim=1)[rank].clone().requires_grad_()  # [h, 4h] -> [h, 4h/n]
    rows = w2.chunk(n, dim=0)[rank].clone().requires_grad_()  # [4h, h] -> [4h/n, h]
    x = batches[0].clone().requires_grad_()
    partial = F.gelu(CopyToRanks.apply(x) @ columns) @ rows
    output = x + SumOverRanks.apply(partial)
    output.square().mean().backward()

    whole = [w.clone().requires_grad_() for w in (w1, w2, batches[0])]
    expected = block(whole[2], whole[0], whole[1])
    expected.square().mean().backward()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(x.grad, whole[2].grad)
    torch.testing.assert_close(columns.grad, whole[0].grad.chunk(n, dim=1)[rank])
    torch.testing.assert_close(rows.grad, whole[1].grad.chunk(n, dim=0)[rank])


def pipeline_parallel(w1: torch.Tensor, w2: torch.Tensor, batches: torch.Tensor) -> None:
    """Every rank is a stage of one block. For brevity, all stages have the same weights."""
    rank, n = dist.get_rank(), dist.get_world_size()
    x = batches[0].clone()
    if rank > 0:
        dist.recv(x, rank - 1)
    x.requires_grad_()
    output = block(x, w1, w2)
    if rank < n - 1:
        dist.send(output.detach(), rank + 1)
        gradient = torch.empty_like(output)
        dist.recv(gradient, rank + 1)
        output.backward(gradient)
    else:
        output.square().mean().backward()
    if rank > 0:
        dist.send(x.grad, rank - 1)

    first = batches[0].clone().requires_grad_()
    y = first
    for _ in range(n):
        y = block(y, w1, w2)
    y.square().mean().backward()
    if rank == 0:
        torch.testing.assert_close(x.grad, first.grad)


def whole_gradient(w1: torch.Tensor, w2: torch.Tensor, batches: torch.Tensor) -> torch.Tensor:
    """The flat gradient that one process computes from the batches of all ranks."""
    alone = [w.clone().requires_grad_() for w in (w1, w2)]
    block(batches, *alone).square().mean().backward()
    return torch.cat([w.grad.flatten() for w in alone])


def bytes_written() -> int | None:
    """Bytes that this process has passed to write calls, also of sockets, or None."""
    counters = Path("/proc/self/io")
    if dist.get_backend() != "gloo" or not counters.exists():
        return None  # NCCL does not write to its peers through the kernel
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
    if 4 * H % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {4 * H}, the hidden size of the MLP")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    w1, w2 = torch.randn(H, 4 * H) / H**0.5, torch.randn(4 * H, H) / (4 * H) ** 0.5
    batches = torch.randn(n, B, SEQUENCE, H).to(device)
    w1, w2 = w1.to(device), w2.to(device)
    parameters, activations = w1.nbytes + w2.nbytes, batches[0].nbytes
    neighbours = (rank > 0) + (rank < n - 1)
    strategies = {
        data_parallel: 2 * (n - 1) / n * parameters,
        sharded: 3 * (n - 1) / n * parameters,
        tensor_parallel: 2 * 2 * (n - 1) / n * activations,
        pipeline_parallel: neighbours * activations,
    }
    reporter = n // 2  # a rank in the middle of the pipeline
    if rank == reporter:
        print(f"{n} ranks, S = {parameters / KIB:.0f} KiB, A = {activations / KIB:.0f} KiB")
        print(f"sent by rank {rank} in one step, KiB    formula  counted")
    for strategy, predicted in strategies.items():
        dist.all_reduce(torch.zeros(1, device=device))  # all ranks start together
        before = bytes_written()
        strategy(w1, w2, batches)
        after = bytes_written()
        if rank == reporter:
            assert before is None or abs(after - before - predicted) < 0.1 * predicted + KIB
            counted = "not here" if before is None else f"≈{(after - before) / KIB:.0f}"
            name = strategy.__name__
            print(f"{name:33}  {predicted / KIB:9.0f}  {counted:>7}, equal to one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
