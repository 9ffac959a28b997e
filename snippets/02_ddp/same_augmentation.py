"""Every rank draws the same augmentation: two seeding mistakes, counted.

A dataset draws one random number for each sample it serves (a crop, a flip, a noise level).
All draws should differ: over the samples, the loader's workers, the epochs and the ranks.

    (no flag)     torch.manual_seed(0) on each rank: right for the weights, and it makes the
                  workers of all ranks draw the same numbers
    --generator   the dataset owns a generator: it is copied into every worker of every epoch
    --fix        the rank is in the seed, and a worker seeds what the dataset owns
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

SAMPLES, WORKERS, EPOCHS = 32, 2, 2


class Augmented(Dataset):
    """Serves the augmentation that was drawn in place of an augmented image."""

    def __init__(self, own_generator: bool) -> None:
        self.generator = torch.Generator().manual_seed(0) if own_generator else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand((), dtype=torch.float64, generator=self.generator)


def seed_worker(worker_id: int) -> None:
    """DataLoader has seeded torch, random and numpy in this worker; the rest is ours."""
    worker = get_worker_info()
    if worker.dataset.generator is not None:
        worker.dataset.generator.manual_seed(worker.seed)


def draws(own_generator: bool, fix: bool) -> torch.Tensor:
    """All augmentations of this rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    # ... build the model here, the same on every rank, then:
    if fix:
        torch.manual_seed(1 + rank)

    dataset = Augmented(own_generator)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=4,
        sampler=sampler,
        num_workers=WORKERS,
        worker_init_fn=seed_worker if fix else None,
    )
    seen, orders = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        seen.extend(loader)
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, orders)
    for of_ranks in zip(*shares, strict=True):  # in each epoch they serve all samples
        assert set().union(*of_ranks) == set(range(SAMPLES))
    assert orders[0] != orders[1]
    return torch.cat(seen)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generator", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=2 same_augmentation.py")

    dist.init_process_group("gloo")  # nothing here needs an accelerator
    mine = draws(args.generator, args.fix)
    of_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, mine)
    everything = torch.cat(of_rank)
    distinct = everything.unique().numel()
    if dist.get_rank() == 0:
        print(f"{len(of_rank)} ranks × {WORKERS} workers × {EPOCHS} epochs:", end=" ")
        print(f"{everything.numel()} samples served, {distinct} distinct augmentations")
        for r, values in enumerate(of_rank):
            print(f"  rank {r}: {', '.join(f'{value:.3f}' for value in values[:4])}, …")
        sys.stdout.flush()

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 0 if distinct == everything.numel() else 1


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
