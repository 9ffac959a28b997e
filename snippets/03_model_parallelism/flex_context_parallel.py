"""FlexAttention over several ranks: any mask, with the work balanced over the ranks.

Three documents are packed into one sequence. Each rank has a part of the tokens and their rows
of the block mask. The keys and values of all ranks are gathered before attention. A balancer
decides which tokens a rank gets: none, head and tail (zigzag), or one that distributes rows of
blocks by the number of their blocks that are not empty. All names with an underscore are
private, but torchtitan imports them. On a CPU only forward runs.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _context_parallel as cp
from torch.distributed.tensor.experimental._context_parallel import _load_balancer
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.attention import flex_attention as flex

S, D = 2048, 8  # 16 blocks of 128 tokens: 1, 2, 4 and 8 ranks divide their halves
DOCUMENTS = (1300, 300, 448)
torch.compiler.set_stance("force_eager")  # starts sooner; remove this line in training


class Attention(nn.Module):
    """The style's hook needs a module that takes query, key and value."""

    def forward(self, query, key, value, block_mask):
        return flex.flex_attention(query, key, value, block_mask=block_mask)


def attend(mesh, qkv, mask, balancer) -> tuple[torch.Tensor, int]:
    """Return the output of the whole sequence, and the blocks that this rank computes."""
    style = cp._ContextParallel(2, cp._ContextParallel.AttentionType.FLEX)
    attention = parallelize_module(Attention(), mesh, style)
    *ours, rows = cp._context_parallel_shard(mesh, [*qkv, mask], [2, 2, 2, 2], balancer)
    out = attention(*ours, block_mask=rows)  # all keys and values, these tokens' queries
    (whole,) = cp.context_parallel_unshard(mesh, [out], [2], balancer)
    return whole, int(rows.kv_num_blocks.sum() + rows.full_kv_num_blocks.sum())


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
    if S % (256 * world):
        sys.exit(f"blocks of 128 tokens: 256 times the number of ranks must divide {S}")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    qkv = [torch.randn(1, 1, S, D, device=device) for _ in range(3)]
    document = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    document = document.to(device)

    def in_document(_batch, _head, query, key):
        return (document[query] == document[key]) & (query >= key)

    mask = flex.create_block_mask(in_document, 1, 1, S, S, device=device)
    # the same mask without in_document: a triangle for each document
    triangles = [torch.ones(size, size, device=device).tril() for size in DOCUMENTS]
    allowed = torch.block_diag(*triangles).bool()
    truth = F.scaled_dot_product_attention(*qkv, attn_mask=allowed)
    for name, balancer in {
        "none": None,
        "head and tail": _load_balancer._HeadTailLoadBalancer(S, world, device),
        "by blocks": _load_balancer._PTRRLoadBalancer(mask, world),
    }.items():
        out, blocks = attend(mesh, qkv, mask, balancer)
        torch.testing.assert_close(out, truth)
        counts: list = [None] * world
        dist.all_gather_object(counts, blocks)
        assert name != "by blocks" or max(counts) - min(counts) <= 2, counts
        if dist.get_rank() == 0:
            print(f"{name:13}: equal to one process; blocks computed on each rank: {counts}")


if __name__ == "__main__":
    main()
    dist.barrier()
    dist.destroy_process_group()
