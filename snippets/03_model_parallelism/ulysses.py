"""Ulysses: an all-to-all turns parts of the sequence into parts of the heads.

Attention treats each head separately, and all other operations treat each token separately. So
cut by tokens everywhere, and by heads inside attention: an all-to-all of Q, K and V before it,
and one of the output after it (Jacobs et al., 2023). Every attention kernel and every mask
works unchanged, because each rank has whole sequences. A rank sends less than 1/n of a tensor.
The number of ranks cannot exceed the number of heads. Forward and backward are compared with
one process.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F

B, HEADS, S, D = 2, 12, 480, 16  # 1, 2, 3 and 4 ranks divide both S and HEADS
KIB = 1024
sent = 0  # bytes that left this rank


def exchange(x: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
    """Cut `x` along dimension `scatter`, send each rank its part, join along `gather`."""
    global sent
    n = dist.get_world_size()
    outgoing = torch.stack([part.contiguous() for part in x.chunk(n, dim=scatter)])
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing)
    sent += outgoing.nbytes * (n - 1) // n  # one part is not sent
    return torch.cat(list(incoming), dim=gather)


class AllToAll(torch.autograd.Function):
    """The exchange with a backward, which is the opposite exchange."""

    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.scatter, ctx.gather = scatter, gather
        return exchange(x, scatter, gather)

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.gather, ctx.scatter), None, None


def ulysses_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; arguments and result are [b, heads, s/n, d], tokens in rank order."""
    # [b, heads, s/n, d] -> [b, heads/n, s, d]
    q, k, v = (AllToAll.apply(x, 1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # torch's own kernel
    return AllToAll.apply(out, 2, 1)  # and back


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
    global sent
    n = int(os.environ.get("WORLD_SIZE", "1"))
    if HEADS % n or S % n:
        sys.exit(f"the number of ranks must divide {HEADS} heads and {S} tokens")
    device = init_distributed()
    rank = dist.get_rank()

    torch.manual_seed(0)
    whole = [torch.randn(B, HEADS, S, D, device=device, requires_grad=True) for _ in range(3)]
    truth = F.scaled_dot_product_attention(*whole, is_causal=True)
    d_out = torch.randn_like(truth)
    truth.backward(d_out)
    torch.testing.assert_close(truth[:, :, 0], whole[2][:, :, 0])  # token 0 sees only itself

    ours = [x.detach().chunk(n, dim=2)[rank].clone().requires_grad_() for x in whole]
    kernel = mock.patch.object(
        F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention
    )
    with CommDebugMode() as mode, kernel as attention:
        out = ulysses_attention(*ours)
        forward, sent = sent, 0
        out.backward(d_out.chunk(n, dim=2)[rank])
    backward = sent
    assert mode.get_comm_counts() == {torch.ops.c10d.alltoall_base_: 8}  # and nothing else
    (call,) = attention.call_args_list
    shapes = [list(x.shape) for x in call.args]
    assert shapes == 3 * [[B, HEADS // n, S, D]]  # some heads of all tokens

    torch.testing.assert_close(out, truth.chunk(n, dim=2)[rank], rtol=1e-4, atol=1e-5)
    for mine, full in zip(ours, whole, strict=True):
        torch.testing.assert_close(
            mine.grad, full.grad.chunk(n, dim=2)[rank], rtol=1e-4, atol=1e-5
        )
    size = 4 * B * S * HEADS * D  # of Q, of K, of V or of the output, whole
    assert forward == backward == 4 * (n - 1) * size // n**2
    if rank == 0:
        print(f"{n} ranks: output, dQ, dK and dV equal attention in one process")
        print(f"  on each rank [b, heads, s/n, d] {list(ours[0].shape)}", end=" ")
        print(f"became {shapes[0]}")
        print(f"  sent forward {forward // KIB} KiB, backward {backward // KIB} KiB", end=" ")
        print(f"= 4(n-1)/n² of {size // KIB} KiB each")
        print("sent forward and backward, in units of bsh × bytes per element")
        print("ranks  ring 6(n-1)/n  Ulysses 8(n-1)/n²  with 1/8 of the heads for K and V")
        for ranks in (2, 4, 8, 16, 64):
            ring, ours = 6 * (ranks - 1) / ranks, 8 * (ranks - 1) / ranks**2
            grouped = (2 + 2 / 8) / 4 * ours
            print(f"{ranks:5}  {ring:13.3f}  {ours:17.3f}  ", end="")
            print(f"{ring / 8:6.3f} and {grouped:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
