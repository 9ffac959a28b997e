"""DistributedSampler from scratch: which samples each rank draws, and three common mistakes.

Look for three things. Padding draws some samples twice, also for a validation score.
`drop_last` leaves some samples out. Without `set_epoch`, every epoch has the order of the
first epoch. A sampler computes with five numbers (length, ranks, rank, seed, epoch), so this
program needs no process group. Its result is compared with torch's DistributedSampler.
"""

import math
from collections import Counter
from itertools import cycle, islice

import torch
from torch.utils.data import DistributedSampler

LENGTH, N = 10, 4  # ten samples cannot be shared equally by four ranks
SEED = 3  # the default of torch's DistributedSampler is 0


def indices_of(
    rank: int, n: int, length: int, *, epoch: int = 0, shuffle: bool, drop_last: bool
) -> list[int]:
    """Return the sample indices that `rank` of `n` draws in `epoch`, in order."""
    if shuffle:  # the same permutation on every rank, because the seed is the same
        generator = torch.Generator().manual_seed(SEED + epoch)
        order = torch.randperm(length, generator=generator).tolist()
    else:
        order = list(range(length))
    steps = length // n if drop_last else math.ceil(length / n)
    # if the list is too short, repeat its beginning; if it is too long, cut its end
    order = list(islice(cycle(order), steps * n))
    return order[rank::n]  # so the samples of one step of all ranks are neighbours in `order`


def torchs_indices_of(rank: int, n: int, length: int, *, epoch: int = 0, **options) -> list:
    sampler = DistributedSampler(range(length), num_replicas=n, rank=rank, seed=SEED, **options)
    sampler.set_epoch(epoch)
    return list(sampler)


def show(drop_last: bool) -> None:
    print(f"{LENGTH} samples, {N} ranks, shuffle=False, drop_last={drop_last}")
    drawn = Counter()
    for rank in range(N):
        indices = indices_of(rank, N, LENGTH, shuffle=False, drop_last=drop_last)
        drawn.update(indices)
        print(f"  rank {rank} draws", *indices)
    twice = [index for index, times in drawn.items() if times > 1]
    never = [index for index in range(LENGTH) if index not in drawn]
    print(f"  drawn: {drawn.total()}, seen twice: {twice}, never seen: {never}")


def score_twice_counted() -> None:
    """Print a validation score that counts the padding, and the right score."""
    right = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 0, 1])  # did the model get sample i right?
    shards = [torchs_indices_of(r, N, LENGTH, shuffle=False, drop_last=False) for r in range(N)]
    hits, count = sum(right[s].sum() for s in shards), sum(map(len, shards))
    print(f"validation with DistributedSampler: {hits}/{count} = {hits / count:.3f}")
    # the fix: no padding, and the hits and counts are summed over the ranks
    shards = [range(LENGTH)[rank::N] for rank in range(N)]
    assert sorted(i for shard in shards for i in shard) == list(range(LENGTH))
    hits, count = sum(right[list(s)].sum() for s in shards), sum(map(len, shards))
    print(f"validation with range(rank, length, N): {hits}/{count} = {hits / count:.3f}")


def epochs(call_set_epoch: bool) -> None:
    """Print what rank 0 of two draws in three epochs, and what no rank draws in ten."""
    samplers = [DistributedSampler(range(9), 2, rank, drop_last=True) for rank in range(2)]
    seen = set()
    for epoch in range(10):
        for sampler in samplers:
            if call_set_epoch:
                sampler.set_epoch(epoch)
            seen.update(sampler)
        if epoch < 3:
            print(f"  epoch {epoch}: rank 0 draws", *samplers[0])
    print(f"  never seen by any rank in 10 epochs: {sorted(set(range(9)) - seen)}")


def main() -> None:
    show(drop_last=False)
    show(drop_last=True)
    score_twice_counted()

    print("9 samples, 2 ranks, shuffle=True, drop_last=True, set_epoch forgotten")
    epochs(call_set_epoch=False)
    print("the same, with sampler.set_epoch(epoch) before each epoch")
    epochs(call_set_epoch=True)

    cases = 0
    for n in (1, 2, 3, 4, 7):
        for length in (1, 2, 9, 10, 12):
            for drop_last in (False, True):
                for rank in range(n):
                    for shuffle, epoch in ((False, 0), (True, 0), (True, 5)):
                        case = {"epoch": epoch, "shuffle": shuffle, "drop_last": drop_last}
                        ours = indices_of(rank, n, length, **case)
                        assert ours == torchs_indices_of(rank, n, length, **case), case
                        cases += 1
    print(f"ours = torch.utils.data.DistributedSampler in {cases} cases")


if __name__ == "__main__":
    main()
