"""A fused matrix for q, k and v that is cut as one matrix gives a wrong output.

A fused projection contains the rows of q, then those of k, then those of v. If it is cut into
four parts, the first part contains only queries. The shapes are right on every rank, so
attention runs, but the output is wrong. The fix cuts each of the three by heads.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

B, S, H, HEADS = 2, 16, 96, 12  # 1, 2, 3 and 4 ranks divide the heads


def cut_as_one(qkv: torch.Tensor, rank: int, t: int) -> torch.Tensor:
    return qkv.chunk(t, dim=0)[rank]  # [3h, h] -> [3h/t, h]


def cut_each(qkv: torch.Tensor, rank: int, t: int) -> torch.Tensor:
    return torch.cat([part.chunk(t, dim=0)[rank] for part in qkv.chunk(3, dim=0)])


def attend(x: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """[b, s, h] -> [b, s, h]: the whole sum, or the term of a rank."""
    q, k, v = (
        part.unflatten(2, (-1, H // HEADS)).transpose(1, 2)
        for part in F.linear(x, qkv).chunk(3, dim=2)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


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
    x = torch.randn(B, S, H).to(device)
    qkv, out = (torch.randn(rows, H).to(device) / H**0.5 for rows in (3 * H, H))
    alone = nn.MultiheadAttention(H, HEADS, bias=False, batch_first=True).to(device)
    alone.load_state_dict({"in_proj_weight": qkv, "out_proj.weight": out})
    after = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)  # tokens in the future
    expected = alone(x, x, x, attn_mask=after)[0].detach()
    for cut in (cut_as_one, cut_each):
        mine = cut(qkv, rank, t)
        term = attend(x, mine, out.chunk(t, dim=1)[rank])
        dist.all_reduce(term)
        error = ((term - expected).norm() / expected.norm()).item()
        if rank == 0:
            result = "equal to one device" if error < 1e-5 else f"wrong by {100 * error:.0f}%"
            print(f"{cut.__name__:10}  shard {tuple(mine.shape)}, output {result}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
