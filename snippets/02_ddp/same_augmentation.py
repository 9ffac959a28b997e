"""Every rank draws the same augmentation: two mistakes with seeds, and their fix.

A dataset draws one random number for each sample that it serves. The number represents a random
augmentation, such as a crop, a flip or noise. All numbers should be different, for all samples,
workers, epochs and ranks.

    (no flag)     calls torch.manual_seed(0) on each rank. This gives all ranks the same initial
                  weights, but also gives their workers the same random numbers.
    --generator   the dataset owns a generator, which is copied into each worker in each epoch
    --fix         uses a different seed on each rank after the model was built, and seeds the
                  generator of the dataset in each worker

The output shows how many numbers are different, and which of them repeat: a number can be drawn
by several ranks, in several epochs, or by several workers.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, get_worker_info

SAMPLES, WORKERS, EPOCHS, BATCH = 32, 2, 2, 4


class Augmented(Dataset):
    """Serves the random number of an augmentation instead of an augmented image."""

    def __init__(self, own_generator: bool) -> None:
        self.generator = torch.Generator().manual_seed(0) if own_generator else None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand((), dtype=torch.float64, generator=self.generator)


def seed_worker(worker_id: int) -> None:
    """Seed the generator that the dataset of this worker owns.

    DataLoader has already seeded torch, random and numpy in this worker.
    """
    worker = get_worker_info()
    if worker.dataset.generator is not None:
        worker.dataset.generator.manual_seed(worker.seed)


def draw(own_generator: bool, fix: bool) -> tuple[torch.Tensor, list[list[float]]]:
    """The weight of the model, and the numbers that this rank draws in each epoch."""
    torch.manual_seed(0)
    weight = nn.Linear(2, 2).weight.detach()  # the model: the same on every rank
    if fix:
        torch.manual_seed(1 + dist.get_rank())

    dataset = Augmented(own_generator)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(
        dataset,
        batch_size=BATCH,
        sampler=sampler,
        num_workers=WORKERS,
        worker_init_fn=seed_worker if fix else None,
    )
    numbers, orders = [], []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
        numbers.append([value for batch in loader for value in batch.tolist()])
    orders_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(orders_of_ranks, orders)
    for of_epoch in zip(*orders_of_ranks, strict=True):  # the ranks serve all samples
        assert set().union(*of_epoch) == set(range(SAMPLES))
    assert orders[0] != orders[1]
    return weight, numbers


def repetitions(numbers: list[list[list[float]]]) -> list[str]:
    """Which of ranks, epochs and workers draw the same number; `numbers[rank][epoch]`."""
    sources: dict[float, set[tuple[int, int, int]]] = {}
    for rank, of_rank in enumerate(numbers):
        for epoch, of_epoch in enumerate(of_rank):
            for i, value in enumerate(of_epoch):
                worker = i // BATCH % WORKERS  # the workers serve the batches in turns
                sources.setdefault(value, set()).add((rank, epoch, worker))
    repeated = []
    for position, name in enumerate(("ranks", "epochs", "workers")):
        if any(len({source[position] for source in found}) > 1 for found in sources.values()):
            repeated.append(name)
    return repeated


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--generator", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start with torchrun: torchrun --nproc-per-node=2 same_augmentation.py")

    os.environ["LOCAL_RANK"] = "0"  # as on nodes with one process each: only the rank differs
    dist.init_process_group("gloo")  # nothing here needs an accelerator
    n = dist.get_world_size()
    weight, mine = draw(args.generator, args.fix)
    weights = [torch.empty_like(weight) for _ in range(n)]
    dist.all_gather(weights, weight)
    assert all(torch.equal(other, weight) for other in weights)  # the fix must not change this

    numbers: list = [None] * n
    dist.all_gather_object(numbers, mine)
    everything = [value for of_rank in numbers for of_epoch in of_rank for value in of_epoch]
    distinct = len(set(everything))
    repeated = repetitions(numbers)
    assert bool(repeated) == (distinct < len(everything))
    if dist.get_rank() == 0:
        print(f"{n} ranks × {WORKERS} workers × {EPOCHS} epochs:", end=" ")
        print(f"{len(everything)} samples served, {distinct} different augmentations")
        for r, of_rank in enumerate(numbers):
            print(f"  rank {r}: {', '.join(f'{value:.3f}' for value in of_rank[0][:4])}, …")
        print(f"  numbers repeat across: {', '.join(repeated) or 'none'}")
        sys.stdout.flush()

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if repeated else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
