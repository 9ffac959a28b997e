"""Ulysses inside a node and a ring between nodes: context parallelism in two dimensions.

An all-to-all in groups of u ranks exchanges tokens for heads. Each rank then has s/r tokens of
1/u of the heads, and a ring of r ranks passes keys and values on (Fang and Zhao, 2024). The
ring has r - 1 hops instead of n - 1, and Ulysses needs u heads instead of n. Every split of n
ranks into u and r is compared with attention over the whole sequence in one process, forward
and backward. The bytes of each dimension are counted and compared with a formula.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

B, HEADS, S, D = 2, 12, 480, 16  # 1, 2, 3 and 4 ranks divide both S and HEADS
KIB = 1024
sent = 0  # bytes given to isend by this rank, in the ring
exchanged = 0  # bytes that left it in all-to-alls


def pass_on(tensors: list[torch.Tensor], group: dist.ProcessGroup):
    """Start to send `tensors` to the next rank. Return the receive buffers and the handles."""
    global sent
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    arriving = [torch.empty_like(tensor) for tensor in tensors]
    ops = []
    for outgoing, incoming in zip(tensors, arriving, strict=True):
        after, before = ((rank + step) % n for step in (1, -1))
        ops.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=after))
        ops.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=before))
        sent += outgoing.nbytes
    return arriving, dist.batch_isend_irecv(ops)


def wait(handles: list) -> None:
    for handle in handles:
        handle.wait()


class RingAttention(torch.autograd.Function):
    """softmax(QKᵀ/√d)V over the tokens of all ranks; arguments are [b, heads, s/n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, group):
        n, scale = dist.get_world_size(group), 1 / math.sqrt(q.shape[-1])
        q32 = q.float()  # running sums stay in fp32, because rounding after every block adds up
        top = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=torch.float32)  # row's maximum
        total = torch.zeros_like(top)  # running sum of exp(score - top)
        out = torch.zeros_like(
            q, dtype=torch.float32
        )  # running sum of exp(score - top) · value
        block = [k.contiguous(), v.contiguous()]
        with torch.autocast(q.device.type, enabled=False):
            for step in range(n):
                if step < n - 1:  # sends the block while this rank computes with it
                    arriving, handles = pass_on(block, group)
                scores = q32 @ block[0].float().mT * scale  # [b, heads, s/n, s/n]
                new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
                weights = torch.exp(scores - new_top)
                shrink = torch.exp(top - new_top)  # for the sums with the old maximum
                total = total * shrink + weights.sum(-1, keepdim=True)
                out = out * shrink + weights @ block[1].float()
                top = new_top
                if step < n - 1:
                    wait(handles)
                    block = arriving
        out = (out / total).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, top + total.log())
        ctx.group, ctx.scale = group, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out):
        q, k, v, out, log_total = ctx.saved_tensors
        group, n = ctx.group, dist.get_world_size(ctx.group)
        q32, d_out = q.float(), d_out.float()
        dot = (d_out * out).sum(-1, keepdim=True)  # D, one number for each query
        dq = torch.zeros_like(q32)

        def gradients(k, v):
            """Add to dq. Return the contribution of these queries to the block's dk and dv."""
            k, v = k.float(), v.float()
            weights = torch.exp(q32 @ k.mT * ctx.scale - log_total)  # softmax, recomputed
            d_scores = weights * (d_out @ v.mT - dot) * ctx.scale
            dq.add_(d_scores @ k)
            return d_scores.mT @ q32, weights.mT @ d_out

        block, collected, more = [k.contiguous(), v.contiguous()], [], []
        for step in range(n):
            if step < n - 1:
                arriving, handles = pass_on(block, group)
            part = gradients(*block)
            if step == 0:
                own = part  # is kept; the sum of the other ranks arrives at the end
            else:  # one hop behind the block, so they meet again on the next rank
                wait(more)  # was sent while `gradients` computed
                part = [c + p for c, p in zip(collected, part, strict=True)] if more else part
                collected, more = pass_on([g.to(k.dtype).contiguous() for g in part], group)
            if step < n - 1:
                wait(handles)
                block = arriving
        wait(more)  # the last hop to the owner, with no computation left to hide it
        dk, dv = map(torch.add, own, collected) if more else own
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class Exchange(torch.autograd.Function):
    """Cut along `scatter`, send each rank of `group` its part, join along `gather`."""

    @staticmethod
    def forward(ctx, x, scatter, gather, group):
        global exchanged
        ctx.opposite = gather, scatter, group
        u = dist.get_world_size(group)
        outgoing = torch.stack([part.contiguous() for part in x.chunk(u, dim=scatter)])
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=group)
        exchanged += outgoing.nbytes * (u - 1) // u  # one part is not sent
        return torch.cat(list(incoming), dim=gather)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, *ctx.opposite), None, None, None


def two_level_attention(q, k, v, mesh) -> torch.Tensor:
    """Attention over all tokens; arguments and result are [b, heads, s/n, d], in rank order."""
    ulysses, ring = mesh["ulysses"].get_group(), mesh["ring"].get_group()
    # [b, heads, s/n, d] -> [b, heads/u, s/r, d]
    q, k, v = (Exchange.apply(x, 1, 2, ulysses) for x in (q, k, v))
    return Exchange.apply(RingAttention.apply(q, k, v, ring), 2, 1, ulysses)


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
    global sent, exchanged
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % n or S % n:
        sys.exit(f"the number of ranks must divide {HEADS} heads and {S} tokens")
    device = init_distributed()
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(B, HEADS, S, D, device=device, requires_grad=True) for _ in range(3)]
    truth = F.scaled_dot_product_attention(*whole)
    d_out = torch.randn_like(truth)
    truth.backward(d_out)
    size = 4 * B * S * HEADS * D  # S, the bytes of Q, of K, of V or of the output
    if rank == 0:
        print(
            f"{n} ranks; Q, K, V and the output have S = {size // KIB} KiB each; a rank sends"
        )
        print("u, Ulysses  r, ring  in all-to-alls  8(u-1)/un · S  in the ring  6(r-1)/n · S")
    for u in (d for d in range(1, n + 1) if n % d == 0):
        r = n // u
        mesh = init_device_mesh(device.type, (r, u), mesh_dim_names=("ring", "ulysses"))
        node = list(range(rank // u * u, rank // u * u + u))  # the ranks of an all-to-all
        assert dist.get_process_group_ranks(mesh["ulysses"].get_group()) == node
        ours = [x.detach().chunk(n, dim=2)[rank].clone().requires_grad_() for x in whole]
        sent = exchanged = 0
        out = two_level_attention(*ours, mesh)
        out.backward(d_out.chunk(n, dim=2)[rank])
        torch.testing.assert_close(out, truth.chunk(n, dim=2)[rank], rtol=1e-4, atol=1e-5)
        for mine, full in zip(ours, whole, strict=True):
            true = full.grad.chunk(n, dim=2)[rank]
            torch.testing.assert_close(mine.grad, true, rtol=1e-4, atol=1e-5)
        inside, around = 8 * (u - 1) * size // (u * n), 6 * (r - 1) * size // n
        assert (exchanged, sent) == (inside, around), (u, r)
        if rank == 0:
            numbers = [f"{bytes_ / KIB:7g} KiB" for bytes_ in (exchanged, inside, sent, around)]
            print(f"{u:10}  {r:7}  {numbers[0]:>14}  {numbers[1]:>13}  ", end="")
            print(f"{numbers[2]:>11}  {numbers[3]:>12}")
    if rank == 0:
        print("output, dQ, dK and dV equal attention in one process, for every split")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
