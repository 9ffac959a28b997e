"""Embedding and cross-entropy with the vocabulary cut over ranks, without a gather of logits.

Each rank has V/t rows of the tied embedding. The vector of a token comes from the one rank that
has its row, and all other ranks add zeros. The loss of a token needs three numbers from all
ranks: the largest logit, the sum of the exponentials, and the logit of the target. Loss and
gradients equal those of F.cross_entropy on one process.
"""

import math
import os
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.nn import functional as F

B, S, H, V = 8, 256, 16, 1536  # 1, 2, 3 and 4 ranks divide the vocabulary


class CopyToRanks(torch.autograd.Function):
    """f: a copy in forward, an all-reduce in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return SumOverRanks.apply(gradient)


class SumOverRanks(torch.autograd.Function):
    """g: an all-reduce in forward, a copy in backward."""

    @staticmethod
    def forward(ctx, term):
        total = term.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return CopyToRanks.apply(gradient)


def locate(tokens: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s] of ids -> their rows in this rank's shard, and whether they are in it."""
    local = tokens - dist.get_rank() * rows
    mine = (local >= 0) & (local < rows)
    return local.masked_fill(~mine, 0), mine


def embed(tokens: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """[b, s] -> [b, s, h]; `shard` has [V/t, h]."""
    local, mine = locate(tokens, len(shard))
    return SumOverRanks.apply(F.embedding(local, shard) * mine[..., None])


class VocabularyParallelLoss(torch.autograd.Function):
    """Mean cross-entropy of logits [b, s, V/t] that are not gathered. -100 is not a target."""

    @staticmethod
    def forward(ctx, logits, targets):
        ctx.dtype = logits.dtype
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        largest = logits.amax(dim=-1)  # [b, s]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        exponentials = (logits - largest[..., None]).exp()
        total = exponentials.sum(dim=-1)
        dist.all_reduce(total)
        local, mine = locate(targets, logits.shape[-1])
        target = logits.gather(-1, local[..., None])[..., 0] * mine
        dist.all_reduce(target)
        counted = targets != -100
        ctx.save_for_backward(exponentials / total[..., None], local, mine, counted)
        return (largest + total.log() - target)[counted].mean()

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError("VocabularyParallelLoss has no second derivative")
        softmax, local, mine, counted = ctx.saved_tensors
        one_hot = torch.zeros_like(softmax).scatter_(-1, local[..., None], 1.0)
        difference = softmax - one_hot * mine[..., None]  # each rank has its own columns
        difference *= (counted.to(softmax) / counted.sum())[..., None]
        return (gradient * difference).to(ctx.dtype), None


def gathered_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The method that it replaces: all logits on every rank."""
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, logits)
    return F.cross_entropy(torch.cat(parts, dim=-1).flatten(0, 1), targets.flatten())


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
    if V % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the vocabulary of {V}")
    device = init_distributed()
    rank, t = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    table, mixer = torch.randn(V, H).to(device), torch.randn(H, H).to(device)
    tokens, targets = torch.randint(V, (2, B, S)).to(device)
    targets[:, ::5] = -100  # every fifth token has no target

    # one process; the mixer takes the place of the layers
    whole = table.clone().requires_grad_()
    hidden = torch.tanh(F.embedding(tokens, whole) @ mixer)
    expected = F.cross_entropy((hidden @ whole.T).flatten(0, 1), targets.flatten())
    (3 * expected).backward()  # the loss is one part of a sum

    shard = table.chunk(t)[rank].clone().requires_grad_()
    reduce = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce).start()
    embedded = embed(tokens, shard)
    torch.testing.assert_close(embedded, F.embedding(tokens, table))
    hidden = torch.tanh(embedded @ mixer)
    logits = CopyToRanks.apply(hidden) @ shard.T  # [b, s, V/t]
    dist.barrier()
    marks = [bytes_written()]
    loss = VocabularyParallelLoss.apply(logits, targets)
    marks.append(bytes_written())
    torch.testing.assert_close(gathered_loss(logits.detach(), targets), loss.detach())
    marks.append(bytes_written())
    (3 * loss).backward()
    marks.append(bytes_written())
    reduced = [call.args[0].numel() for call in reduce.call_args_list]
    assert reduced == [B * S * H, *3 * [B * S], B * S * H]  # embedding, loss, f in backward
    of_f = 2 * (t - 1) / t * 4 * B * S * H  # backward sends nothing else, apart from headers
    assert marks[0] is None or 0 <= marks[3] - marks[2] - of_f < t * 2**12

    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(shard.grad, whole.grad.chunk(t)[rank], rtol=1e-4, atol=1e-7)
    again = VocabularyParallelLoss.apply(logits, targets)
    try:
        torch.autograd.grad(again, logits, create_graph=True)
    except RuntimeError as error:
        assert "no second derivative" in str(error)
    else:
        raise AssertionError("create_graph=True leads to a wrong second derivative")
    large = VocabularyParallelLoss.apply(100 * logits.detach(), targets)  # exp overflows
    true = F.cross_entropy((100 * hidden @ table.T).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(large, true.detach())
    half = logits.detach()[:1].bfloat16()  # its exponentials are summed in fp32
    of_half, true = VocabularyParallelLoss.apply(half, targets[:1]), half.float()
    torch.testing.assert_close(of_half, gathered_loss(true, targets[:1]))
    if rank == 0:
        three, gather = 3 * 2 * (t - 1) / t * 4 * B * S, (t - 1) / t * 4 * B * S * V
        assert math.isclose(gather, V / 6 * three)
        print(f"t = {t}: rank 0 has tokens 0 to {V // t - 1} of {V}")
        print(f"loss {loss.item():.4f}, one process {expected.item():.4f}")
        print("embedding, loss, gradient of the tied table: equal")
        print("sent by a rank for the loss          formula     counted")
        for name, size, begin in (
            ("three all-reduces of bs", three, 0),
            ("an all-gather of the logits", gather, 1),
        ):
            before, after = marks[begin : begin + 2]
            sent = "–" if before is None else f"≈{(after - before) / 1024:.1f} KiB"
            # headers and other output of this process are a few KiB
            assert before is None or 0 <= after - before - size < t * 2**12
            print(f"  {name:28} {size / 1024:9.1f} KiB  {sent:>10}")
        print(f"ratio of the formulas: V/6 = {V // 6}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
