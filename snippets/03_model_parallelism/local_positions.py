"""Positions that each rank counts from 0 make context parallelism wrong without an error.

After the sequence is cut, the tokens of a rank are 0, 1, 2 … in memory, but not in the text.
Two parts of attention need the true positions: rotary embeddings and the causal mask. With
local positions nothing fails and no shape changes, but every rank after the first has a wrong
output.

    (no flag)   the mask and the rotation use arange(s/n)
    --fix      both use rank · s/n + arange(s/n)
"""

import argparse
import os
import sys
from itertools import combinations, permutations

import torch
import torch.distributed as dist
from torch.nn import functional as F

B, HEADS, S, D = 1, 4, 64, 16


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [b, heads, tokens, d]."""
    speed = 10000.0 ** (-torch.arange(0, D, 2, device=x.device) / D)
    angle = positions[:, None] * speed  # [tokens, d/2]
    even, odd = x[..., ::2], x[..., 1::2]
    pairs = even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()
    return torch.stack(pairs, dim=-1).flatten(-2)


def all_tokens(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim=-2)


def attend(q, k, v, of_rotation: torch.Tensor, of_mask: torch.Tensor) -> torch.Tensor:
    """Causal attention of this rank's queries to all keys, by the positions of its tokens."""
    q, k = rotate(q, of_rotation), rotate(k, of_rotation)
    k, v = all_tokens(k), all_tokens(v)
    allowed = torch.arange(S, device=q.device) <= of_mask[:, None]  # [s/n, s]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)


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
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if S % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {S} tokens")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    whole = [torch.randn(B, HEADS, S, D).to(device) for _ in range(3)]
    # the same rotation with complex numbers, by position · 10000^(-i/d) for the pair at i
    angle = torch.tensor([[i / 10000 ** (j / D) for j in range(0, D, 2)] for i in range(S)])
    turn = torch.polar(torch.ones_like(angle), angle).to(device)
    pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2))) for x in whole[:2])
    q, k = (torch.view_as_real(pair * turn).flatten(-2) for pair in pairs)
    truth = F.scaled_dot_product_attention(q, k, whole[2], is_causal=True).chunk(n, 2)[rank]

    mine = [x.chunk(n, dim=2)[rank] for x in whole]
    here = torch.arange(S // n, device=device)
    true = rank * (S // n) + here
    positions = {"local": here, "true": true}
    cases = [("true", "true")] if args.fix else [("local", "local"), *permutations(positions)]
    wrong, outputs = False, []
    for rotation, mask in cases:
        outputs.append(attend(*mine, positions[rotation], positions[mask]))
        error = (outputs[-1] - truth).norm() / truth.norm()
        errors = [torch.empty_like(error) for _ in range(n)]
        dist.all_gather(errors, error)
        wrong |= max(errors).item() > 1e-5
        if rank == 0:
            shown = ", ".join("equal" if e < 1e-5 else f"off by ≈{e:.0%}" for e in errors)
            print(f"rotation {rotation}, mask {mask}: ranks 0 to {n - 1}: {shown}", flush=True)
    for one, other in combinations(outputs, 2):
        assert torch.allclose(one, other) == (rank == 0)  # only rank 0 has true local positions
    dist.barrier()  # rank 0 has printed before a rank exits with an error
    return int(wrong)


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
