"""Dropout under tensor parallelism needs two streams of random numbers.

Where all ranks have the same activations, they must drop the same elements. Otherwise the
copies become different. Where each rank has its own heads, the ranks must drop different
elements. Otherwise heads on different ranks share a mask. A single seed for all ranks, or one
seed for each rank, is wrong in one of the two places.
"""

import os
import sys

import torch
import torch.distributed as dist

TOKENS, HEADS_HERE, P = 64, 2, 0.1
Generators = dict[str, torch.Generator]


def seeded(seeds: dict[str, int], device: torch.device) -> Generators:
    return {region: torch.Generator(device).manual_seed(seed) for region, seed in seeds.items()}


def regions(rank: int, device: torch.device) -> Generators:
    """The fix, as in Megatron-LM: one stream is equal on all ranks, and one differs."""
    return seeded({"replicated": 1234, "sharded": 1234 + 2718 + rank}, device)


def same_seed(rank: int, device: torch.device) -> Generators:
    return seeded({"replicated": 1234, "sharded": 1234}, device)


def seed_per_rank(rank: int, device: torch.device) -> Generators:
    return seeded({"replicated": 1234 + rank, "sharded": 1234 + rank}, device)


def dropout(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= P
    return x * keep / (1 - P)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)  # [t, ...]


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
    device = init_distributed()
    rank, t = dist.get_rank(), dist.get_world_size()
    for choose in (same_seed, seed_per_rank, regions):
        generators = choose(rank, device)
        # attention probabilities of this rank's heads, then the output after g
        scores = dropout(
            torch.ones(HEADS_HERE, TOKENS, TOKENS, device=device), generators["sharded"]
        )
        output = dropout(torch.ones(TOKENS, TOKENS, device=device), generators["replicated"])
        for dropped in (scores, output):  # one in ten is zero, and the mean stays the same
            assert abs((dropped == 0).float().mean() - P) < 0.03
            assert abs(dropped.mean() - 1) < 0.03
        seeds = {generator.initial_seed() for generator in generators.values()}
        assert len(seeds) == (2 if choose is regions else 1)  # of this rank's two regions
        masks, copies = gather(scores), gather(output)
        differ = (copies != copies[0]).any(dim=0).float().mean().item()
        distinct = len(masks.flatten(0, 1).flatten(1).unique(dim=0))
        if rank == 0:
            print(f"{choose.__name__}")
            print(f"  after g: {100 * differ:.0f}% of the elements differ between ranks")
            print(f"  attention: {distinct} different masks for {t * HEADS_HERE} heads")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
