"""Ring attention: keys and values go around a ring of ranks, and queries stay on their rank.

Every rank has s/n tokens. In n steps, each block of keys and values visits every rank, and an
online softmax merges its contribution. So no rank has the whole sequence, or a row of s scores,
at any time (Liu et al., 2023). In backward the blocks go around again, followed by the
gradients that they have collected. The program compares output and gradients with attention
over the whole sequence in one process, and counts what a rank sends and keeps.

Sums are kept in fp32, and messages have the dtype of the keys. In bf16, the error of the output
is about as large as its own rounding. In production, a fused kernel (chapter 10) is used.
"""

import math
import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

B, HEADS, S, D = 2, 4, 960, 16  # h = 64; 1, 2, 3 and 4 ranks divide S
KIB = 1024
sent = 0  # bytes given to isend by this rank


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
            # --8<-- [start:step]
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
            # --8<-- [end:step]
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
        # --8<-- [start:back]
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
        # --8<-- [end:back]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def compare(group: dist.ProcessGroup, device: torch.device) -> None:
    global sent
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    whole = [torch.randn(B, HEADS, S, D, device=device) for _ in range(3)]
    whole[0][:, 0] *= 40  # the exponentials of the scores of this head overflow
    for x in whole:
        x.requires_grad_()
    truth = F.scaled_dot_product_attention(*whole)
    d_out = torch.randn_like(truth)
    truth.backward(d_out)

    ours = [x.detach().chunk(n, dim=2)[rank].clone().requires_grad_() for x in whole]
    kept: list[int] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(  # to count what it keeps
        lambda x: kept.append(x.nbytes) or x, lambda x: x
    )
    sent = 0
    with hooks, mock.patch.object(torch, "exp", wraps=torch.exp) as exp:
        out = RingAttention.apply(*ours, group)
        forward, sent = sent, 0
        out.backward(d_out.chunk(n, dim=2)[rank])
    backward = sent
    tile, column = 4 * B * HEADS * (S // n) ** 2, 4 * B * HEADS * S // n
    sizes = [call.args[0].nbytes for call in exp.call_args_list]
    assert sizes == n * [tile, column] + n * [tile]  # one block of scores at a time

    pairs = (out, truth), *((x.grad, y.grad) for x, y in zip(ours, whole, strict=True))
    for mine, full in pairs:
        part = full.chunk(n, dim=2)[rank]
        torch.testing.assert_close(mine[:, 1:], part[:, 1:], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine[:, 0], part[:, 0], rtol=1e-4, atol=5e-3)
    size = 4 * B * S * HEADS * D  # S, the bytes of Q, of K, of V or of the output
    assert forward == 2 * (n - 1) * size // n and backward == 2 * forward
    assert sum(kept) == (4 * size + 4 * B * HEADS * S) // n
    if rank == 0:
        print(
            f"{n:5}  {S // n:11}  {forward / KIB:10.0f} KiB  {backward / KIB:10.0f} KiB"
            f"  {sum(kept) / KIB:6.0f} KiB  {max(sizes) / KIB:7.0f} KiB"
        )
    tiny = [x.detach()[:, :, :2].clone().requires_grad_() for x in ours]
    loss = RingAttention.apply(*tiny, group).square().sum()
    (slope,) = torch.autograd.grad(loss, tiny[0], create_graph=True)
    try:
        slope.sum().backward()
    except RuntimeError:
        return
    raise AssertionError("the second derivative is wrong")


def errors_in_bf16(group: dist.ProcessGroup, device: torch.device) -> None:
    """Print the distance of output and gradients from float64, for the ring and for torch."""
    global sent
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    torch.manual_seed(0)
    *inputs, d_out = torch.randn(4, 1, 1, S, D, device=device).bfloat16()

    def results(dtype, attention, cut):
        leaves = [cut(x).to(dtype).detach().requires_grad_() for x in inputs]
        out = attention(*leaves)
        out.backward(cut(d_out).to(dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    def ours(x):
        return x.chunk(n, dim=2)[rank].contiguous()

    def ring(*x):
        with torch.autocast(device.type, torch.bfloat16):  # sums are in fp32 here, too
            return RingAttention.apply(*x, group)

    sent, sdpa = 0, F.scaled_dot_product_attention
    truth = results(torch.float64, sdpa, cut=lambda x: x)
    found = {
        "this ring": results(torch.bfloat16, ring, ours),
        "torch, one process": map(ours, results(torch.bfloat16, sdpa, cut=lambda x: x)),
        "rounding alone": [ours(true).bfloat16() for true in truth],
    }
    assert sent == 6 * (n - 1) * S * D * 2 // n  # two bytes for each element
    off = {}
    for name, tensors in found.items():
        squares = [
            torch.stack([(x - ours(true)).square().sum(), ours(true).square().sum()])
            for x, true in zip(tensors, truth, strict=True)
        ]
        total = torch.stack(squares)  # [4, 2]
        dist.all_reduce(total, group=group)
        off[name] = (total[:, 0] / total[:, 1]).sqrt()
        if rank == 0:
            print(f"  {name:18} " + "  ".join(f"≈{x:.2%}" for x in off[name].tolist()))
    found, whole, rounding = off.values()
    assert (found < 2 * whole).all(), (found, whole)
    assert (found[:2] < 1.1 * rounding[:2]).all()  # dK and dV are rounded on every rank


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
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if S % math.lcm(*range(1, world + 1)):
        sys.exit(f"{S} tokens cannot be cut for every number of ranks up to {world}")
    device = init_distributed()
    groups = [dist.new_group(list(range(n))) for n in range(1, world + 1)]
    if dist.get_rank() == 0:
        size = 4 * B * S * HEADS * D / KIB
        print(f"b = {B}, s = {S}, h = {HEADS * D}; one of Q, K, V is {size:.0f} KiB in fp32")
        print("ranks  tokens/rank    sent forward  sent backward        kept  a score tile")
    for group in groups:
        if dist.get_rank() < dist.get_world_size(group):
            compare(group, device)
        dist.barrier()
    if dist.get_rank() == 0:
        print("output, dQ, dK and dV equal attention over the whole sequence on every rank")
        print("in bf16, output, dQ, dK and dV are off by")
    errors_in_bf16(groups[-1], device)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
