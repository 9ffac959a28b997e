"""This program computes causal ring attention in zigzag order with a flash kernel as its tile.

Rank r stores the chunks r and 2n-1-r of the sequence. Every step of the ring after the first
step is then one dense rectangle without a mask. Either all queries need the first half of the
arriving keys, or the second half of the queries needs all arriving keys. The kernel returns an
output and a log-sum-exp, which are merged. The backward pass gives each tile the finished
output and log-sum-exp. The output and the gradients are compared with one process, and the
bytes and pairs with formulas.
"""

import math
import os
import sys
from itertools import product

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

B, A, TOKENS, D = 1, 4, 480, 16  # 1, 2, 3 and 4 ranks cut TOKENS into 2n chunks
count = {"bytes": 0, "pairs": 0, "by definition": 0}


# --8<-- [start:tile]
def tile_forward(q, k, v, causal: bool):
    """Return a tile's output [b, a, s_q, d] and log-sum-exp [b, a, s_q]."""
    count["pairs"] += q.shape[2] * (q.shape[2] if causal else 2 * k.shape[2]) // 2
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return forward_by_definition(q, k, v, causal)


def wide(*tensors):
    """Convert 16-bit tensors to fp32. Tensors with wider types keep their type."""
    return [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]


def forward_by_definition(q, k, v, causal: bool):
    count["by definition"] += 1
    q, k, v = wide(q, k, v)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf)
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)


def tile_backward(d_out, q, k, v, out, lse, causal: bool):
    """Return a tile's part of dQ, dK and dV; `out` and `lse` belong to the whole row."""
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, q, k, v, out, lse, 0.0, causal
        )
    return backward_by_definition(d_out, q, k, v, out, lse, causal)


def backward_by_definition(d_out, q, k, v, out, lse, causal: bool):
    count["by definition"] += 1
    d_out, q, k, v, out = wide(d_out, q, k, v, out)
    scale = 1 / math.sqrt(q.shape[-1])
    weights = torch.exp(q @ k.mT * scale - lse[..., None])
    weights = weights.tril() if causal else weights
    dot = (d_out * out).sum(-1, keepdim=True)
    d_scores = weights * (d_out @ v.mT - dot) * scale
    return d_scores @ k, d_scores.mT @ q, weights.mT @ d_out


# --8<-- [end:tile]


def pass_on(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Send `tensors` to the next rank and return the tensors of the previous rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving, ops = [torch.empty_like(x) for x in tensors], []
    for outgoing, incoming in zip(tensors, arriving, strict=True):
        ops.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % n))
        ops.append(dist.P2POp(dist.irecv, incoming, (rank - 1) % n))
        count["bytes"] += outgoing.nbytes
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arriving


# --8<-- [start:ring]
def rectangle(step: int, half: int) -> tuple[slice, slice]:
    """Return the rows of our queries and of the arriving keys that form the rectangle."""
    everything, rank, n = slice(0, 2 * half), dist.get_rank(), dist.get_world_size()
    source = (rank - step) % n  # whose keys these are
    if step == 0:
        return everything, everything  # our own keys: the kernel applies the causal mask
    if source < rank:  # their first chunk is before both of ours, their second is after both
        return everything, slice(0, half)
    return slice(half, 2 * half), everything  # both of their chunks are between our two


class ZigzagRing(torch.autograd.Function):
    """Causal attention over the tokens of all ranks; q, k, v [b, a, s/n, d] in zigzag order."""

    @staticmethod
    def forward(ctx, q, k, v):
        n, half = dist.get_world_size(), q.shape[2] // 2
        if k.shape[2] != q.shape[2] or q.shape[2] % 2:
            raise ValueError("q, k and v of a rank need two chunks of equal length each")
        q, block = q.contiguous(), [k.contiguous(), v.contiguous()]
        for step in range(n):
            rows, keys = rectangle(step, half)
            part = [x[:, :, keys] for x in block]
            new, new_lse = tile_forward(q[:, :, rows], *part, causal=step == 0)
            if step == 0:
                out, lse = new.to(new_lse.dtype), new_lse  # 16-bit outputs are summed in fp32
            else:  # merge: two outputs weighted by the exponentials of their log-sum-exps
                old, old_lse = out[:, :, rows], lse[:, :, rows]
                both = torch.logaddexp(old_lse, new_lse)
                out[:, :, rows] = old * (old_lse - both).exp()[..., None]
                out[:, :, rows] += new * (new_lse - both).exp()[..., None]
                lse[:, :, rows] = both
            if step < n - 1:
                block = pass_on(block)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        n, half = dist.get_world_size(), q.shape[2] // 2
        dq, block = torch.zeros_like(q, dtype=lse.dtype), [k.contiguous(), v.contiguous()]
        own = collected = None
        for step in range(n):
            rows, keys = rectangle(step, half)
            ours = [x[:, :, rows].contiguous() for x in (d_out, q, out, lse)]
            part = [x[:, :, keys].contiguous() for x in block]
            share = tile_backward(ours[0], ours[1], *part, *ours[2:], causal=step == 0)
            dq[:, :, rows] += share[0]
            gradients = [torch.zeros_like(x) for x in block]
            for gradient, piece in zip(gradients, share[1:], strict=True):
                gradient[:, :, keys] = piece
            if step == 0:
                own = gradients  # they stay here until the gradients from other ranks arrive
            else:  # the gradients of a block follow the block by one hop
                before = collected or [torch.zeros_like(x) for x in block]
                collected = pass_on([a + b for a, b in zip(before, gradients, strict=True)])
            if step < n - 1:
                block = pass_on(block)
        dk, dv = (a + b for a, b in zip(own, collected, strict=True)) if collected else own
        return dq.to(q.dtype), dk, dv


# --8<-- [end:ring]


# --8<-- [start:decode]
def decode(q, k, v):
    """Attend with one query, which all ranks have, to the keys of all ranks; q [b, a, 1, d]."""
    out, lse = tile_forward(q, k, v, causal=False)  # over the keys of this rank
    pair = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)  # [b, a, 1, d + 1]
    pairs = [torch.empty_like(pair) for _ in range(dist.get_world_size())]
    dist.all_gather(pairs, pair)
    count["decode bytes"] = pair.nbytes
    outs, lses = torch.stack(pairs).split([out.shape[-1], 1], dim=-1)
    return (torch.softmax(lses, dim=0) * outs).sum(0).to(q.dtype)  # weights exp(lse - total)


# --8<-- [end:decode]


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


def check_definition(device: torch.device) -> None:
    """Compare the kernel with the definition, which runs in its place on other devices."""
    for d, causal in product((D, 2 * D), (False, True)):
        d_out, q, k, v = torch.randn(4, B, A, 24, d, device=device)
        out, lse = tile_forward(q, k, v, causal)
        torch.testing.assert_close(forward_by_definition(q, k, v, causal), (out, lse))
        given = d_out, q, k, v, out, lse, causal
        torch.testing.assert_close(backward_by_definition(*given), tile_backward(*given))
    assert count["by definition"] == (8 if device.type == "cpu" else 16)
    count["pairs"] = count["by definition"] = 0


def main() -> None:
    if TOKENS % (2 * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"twice the number of ranks must divide {TOKENS} tokens")
    device = init_distributed()
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    check_definition(device)
    whole = [torch.randn(B, A, TOKENS, D, device=device, requires_grad=True) for _ in range(3)]
    truth = F.scaled_dot_product_attention(*whole, is_causal=True)
    d_out = torch.randn_like(truth)
    truth.backward(d_out)

    def zigzag(x: torch.Tensor) -> torch.Tensor:
        chunks = x.detach().chunk(2 * n, dim=2)
        return torch.cat([chunks[rank], chunks[2 * n - 1 - rank]], dim=2)

    ours = [zigzag(x).requires_grad_() for x in whole]
    out = ZigzagRing.apply(*ours)
    sent_forward, pairs = count["bytes"], count["pairs"]
    out.backward(zigzag(d_out))
    torch.testing.assert_close(out, zigzag(truth), rtol=1e-4, atol=1e-5)
    for mine, full in zip(ours, whole, strict=True):
        torch.testing.assert_close(mine.grad, zigzag(full.grad), rtol=1e-4, atol=1e-5)

    size = 4 * B * A * TOKENS * D  # the bytes of Q, of K, of V or of the output
    assert sent_forward == 2 * (n - 1) * size // n
    assert count["bytes"] == 6 * (n - 1) * size // n
    assert pairs == TOKENS**2 // (2 * n), "every rank computes an equal share of the triangle"
    with torch.no_grad():
        sizes = []
        for length in (TOKENS, TOKENS // 2):  # two sizes of the cache
            query, cache = whole[0][:, :, -1:], [x[:, :, :length] for x in whole[1:]]
            mine = [x.chunk(2 * n, dim=2)[rank::n] for x in cache]  # any split of the cache
            count["pairs"] = 0
            found = decode(query, *(torch.cat(parts, dim=2) for parts in mine))
            together = torch.tensor(count["pairs"], device=device)
            dist.all_reduce(together)
            assert together == length, "each rank attends only to its own part of the cache"
            torch.testing.assert_close(found, F.scaled_dot_product_attention(query, *cache))
            sizes.append(count["decode bytes"])
        assert sizes[0] == sizes[1] == 4 * B * A * (D + 1)
    if device.type == "cpu":
        assert count["by definition"] == 0, "the kernel of the library computes every tile"
    every = [torch.empty((), dtype=torch.long, device=device) for _ in range(n)]
    dist.all_gather(every, torch.tensor(pairs, device=device))
    if rank == 0:
        print(f"{n} ranks, {TOKENS} tokens; one of Q, K, V is {size // 1024} KiB")
        print(f"sent by a rank: {sent_forward // 1024} KiB forward, ", end="")
        print(f"{count['bytes'] // 1024} KiB with backward: 6(n-1)/n of {size // 1024}")
        print(f"pairs computed by each rank: {[x.item() for x in every]}, s²/2n each")
        print("output, dQ, dK and dV equal causal attention in one process")
        print(f"one new token, and a cache of {TOKENS} or {TOKENS // 2} tokens over the ranks:")
        print(f"each rank contributes {sizes[0]} bytes; the output equals one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
