"""A stream is resumed twice, the second time on more ranks: which samples were seen how often?

One epoch is trained in three parts. In the first two parts, N - 1 ranks with two loader workers
each train for a few steps. In the third part, N ranks without workers train to the end of the
epoch. The program does this four times, and each time it saves something else as the place in
the data. Look for the only way in which every sample is seen exactly once.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ROWS = [14 + 5 * shard % 7 for shard in range(8)]  # rows of each shard: not the same number
BATCH, STEPS = 4, 7


class Stream(IterableDataset):
    """The samples (shard, row) of a rank, without the first `done` rows of each shard."""

    def __init__(self, rank: int, n: int, done: list[int], split: bool = True) -> None:
        self.rank, self.n, self.done, self.split = rank, n, done, split

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()  # None if the loader has no workers
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = self.rank * workers + worker, self.n * workers
        if not self.split:
            reader, readers = 0, 1
        unfinished = [shard for shard, rows in enumerate(ROWS) if self.done[shard] < rows]
        for shard in unfinished[reader::readers]:
            for row in range(self.done[shard], ROWS[shard]):
                yield torch.tensor([shard, row])


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


def train_part(
    n: int, workers: int, steps: int | None, way: str, state: dict, device: torch.device
) -> list[tuple[int, int]]:
    """Train on the first `n` ranks from `state` on, and update it; return all samples seen."""
    rank = dist.get_rank()
    done = state.setdefault("rows", [0] * len(ROWS))
    skip = state.get(way, 0)
    batches: Iterator = iter(())
    if rank < n:
        start_at = done if way == "rows of each shard" else [0] * len(ROWS)
        forks = workers == 0 or device.type == "cpu"  # a fork of a process with NCCL may hang
        loader = DataLoader(
            Stream(rank, n, start_at, split=way != "no place, no split"),
            BATCH,
            num_workers=workers,
            multiprocessing_context=None if forks else "forkserver",
        )
        batches = islice(loader, skip, None)  # it reads the skipped batches as well
    seen: list[list[int]] = []
    step = 0
    while steps is None or step < steps:
        batch = next(batches, None)
        left = torch.tensor(0 if batch is None else len(batch), device=device)
        dist.all_reduce(left)  # a rank that has no batch left still takes part
        if left == 0:
            break
        seen += [] if batch is None else batch.tolist()
        step += 1
    # --8<-- [start:state]
    done = list(done)  # rows that were trained on; the workers have read more than these
    for shard, row in seen:
        done[shard] = max(done[shard], row + 1)
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (done, seen))
    state["rows"] = [max(rows) for rows in zip(*(done for done, _ in of_ranks), strict=True)]
    # --8<-- [end:state]
    state["batches of this part"] = step
    state["batches of the epoch"] = state.get("batches of the epoch", 0) + step
    return [tuple(sample) for _, samples in of_ranks for sample in samples]


def main() -> None:
    device = init_distributed()
    n = dist.get_world_size()
    report = print if dist.get_rank() == 0 else lambda *_: None
    fewer = max(1, n - 1)
    parts = ((fewer, 2, STEPS), (fewer, 2, STEPS - 3), (n, 0, None))
    report(f"an epoch of {sum(ROWS)} samples in three parts: {fewer}, {fewer} and {n} rank(s)")
    report("what is saved        samples seen: in total   once   repeatedly   never")
    ways = (
        "no place, no split",
        "batches of this part",
        "batches of the epoch",
        "rows of each shard",
    )
    for way in ways:
        state: dict = {}
        times: Counter = Counter()
        for ranks, workers, steps in parts:
            times.update(train_part(ranks, workers, steps, way, state, device))
        once = sum(count == 1 for count in times.values())
        again, never = len(times) - once, sum(ROWS) - len(times)
        report(f"{way:21}{sum(times.values()):22}{once:7}{again:13}{never:8}")
        exact = once == sum(ROWS) == sum(times.values())
        assert exact == (way == "rows of each shard"), (way, times)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
