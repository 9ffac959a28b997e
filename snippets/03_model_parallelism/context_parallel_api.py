"""torch's context_parallel shards the sequence in zigzag order and replaces attention.

Inside the context manager, every buffer contains the tokens of this rank, and afterwards the
whole sequence again. Attention is computed block by block. The blocks of keys and values come
from one all-gather, or around a ring after set_rotate_method("alltoall"). Only CUDA has kernels
for this. On a CPU the sharding works, and F.scaled_dot_product_attention raises
NotImplementedError.

    (no flag)   attention as the API intends it: runs on GPUs, fails on a CPU
    --gather    attention after an all-gather of keys and values, as for Llama 3; runs anywhere
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn import functional as F

B, HEADS, S, D = 1, 4, 16, 16
plain_attention = F.scaled_dot_product_attention  # context_parallel replaces the name in F


class GatherTokens(torch.autograd.Function):
    """All ranks' tokens in rank order. In backward, the sum of the gradients of our tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        parts = [
            part.contiguous() for part in gradient.chunk(dist.get_world_size(ctx.group), 2)
        ]
        ours = torch.empty_like(parts[0])
        dist.reduce_scatter(ours, parts, group=ctx.group)
        return ours, None


def gathered_attention(q, k, v, positions, group) -> torch.Tensor:
    """Causal attention of [b, heads, s/n, d]; `positions`, [1, 1, s/n, 1], of these tokens."""
    k, v, of_keys = (GatherTokens.apply(x, group) for x in (k, v, positions))
    allowed = of_keys.mT <= positions  # by the positions in the sequence, not in memory
    return plain_attention(q, k, v, attn_mask=allowed)


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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gather", action="store_true")
    args = parser.parse_args()
    if S % (2 * int(os.environ.get("WORLD_SIZE", "1"))):
        sys.exit(f"twice the number of ranks must divide {S} tokens")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,), mesh_dim_names=("cp",))

    torch.manual_seed(0)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # flash needs 16 bits
    q, k, v = (torch.randn(B, HEADS, S, D, device=device, dtype=dtype) for _ in range(3))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    truth = F.scaled_dot_product_attention(*whole, is_causal=True)
    d_out = torch.randn_like(truth)
    truth.backward(d_out)
    positions = torch.arange(S, device=device).view(1, 1, S, 1)
    buffers, status = [q, k, v, d_out, positions], 0
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 5):
            # the same tensors, which now contain this rank's part
            held = positions.flatten().clone()
            ours = [x.clone().requires_grad_() for x in (q, k, v)]
            if args.gather:
                out = gathered_attention(*ours, positions, mesh.get_group())
            else:
                out = F.scaled_dot_product_attention(*ours, is_causal=True)
            out.backward(d_out)
            parts = [out.detach(), *(x.grad for x in ours)]
            parts = context_parallel_unshard(mesh, parts, [2] * 4)
        room = {} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(parts, [truth.detach(), *(x.grad for x in whole)], **room)
        result = "output, dQ, dK and dV, put together again, equal attention in one process"
    except NotImplementedError as error:
        result, status = f"{type(error).__name__}: {error}", 1

    # afterwards every buffer contains the whole sequence again
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), whole, strict=True))
    assert positions.flatten().tolist() == list(range(S))
    everywhere = [torch.empty_like(held) for _ in range(n)]
    dist.all_gather(everywhere, held)
    if rank == 0:
        for r, tokens in enumerate(everywhere):
            print(f"rank {r} holds tokens {tokens.tolist()}")
        print(result, flush=True)
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    return status


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
