"""torchdata's StatefulDataLoader resumes at the exact sample, if its workers stay the same.

With every batch the loader gets the state of the worker's dataset, so samples that were only
read ahead do not count as seen. Look for the number of workers in the state, for the sizes of
the epochs after a resume, and for what a dataset without `state_dict` has to read again.

Needs: pip install torchdata
"""

import sys
import warnings
from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    sys.exit("this program needs: pip install torchdata")

SAMPLES, BATCH, STOP = 40, 4, 3  # STOP: batches until the loader is resumed
warnings.filterwarnings("ignore", message="'set_vital'")  # torchdata 0.11 calls it
warnings.filterwarnings("ignore", message="This DataLoader will create")  # on few cores


class Stream(IterableDataset):
    """Each worker reads every `workers`-th sample; `next` counts what this copy has read."""

    def __init__(self, resets: bool = True) -> None:
        self.next, self.resets = 0, resets

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = range(SAMPLES)[info.id :: info.num_workers] if info else range(SAMPLES)
        while self.next < len(mine):
            self.next += 1  # before the yield, because the code after it runs one sample later
            yield mine[self.next - 1]
        if self.resets:
            self.next = 0  # the next epoch begins at the first sample again

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class WithoutState(IterableDataset):
    """The same samples from a dataset that has no `state_dict`; `read` counts all reads."""

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for sample in range(SAMPLES):
            self.read += 1
            yield sample


def resumed(state: dict, workers: int = 2, resets: bool = True, **options: bool):
    """A loader over a new dataset that continues from `state`."""
    loader = StatefulDataLoader(Stream(resets), BATCH, num_workers=workers, **options)
    loader.load_state_dict(state)
    return loader


def reads_of_a_resume(dataset: IterableDataset) -> int:
    """How many samples are read to get the first batch of BATCH after a resume."""
    loader = StatefulDataLoader(dataset, BATCH, num_workers=0)
    batches = iter(loader)
    for _ in range(STOP):
        next(batches)
    state, before = loader.state_dict(), dataset.read
    loader = StatefulDataLoader(dataset, BATCH, num_workers=0)
    loader.load_state_dict(state)
    first = next(iter(loader)).tolist()
    assert first == list(range(STOP * BATCH, (STOP + 1) * BATCH))
    return dataset.read - before


def main() -> None:
    seen: list[int] = []
    state: dict = {}  # an empty state is the same as no state
    for part in range(3):
        loader = resumed(state)
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if number == STOP and part < 2:
                state = loader.state_dict()
                break
        print(f"part {part + 1}: {len(seen)} samples seen, {len(set(seen))} different")
    in_turns = [  # the batches of a run that is never resumed: the two workers take turns
        range(SAMPLES)[worker::2][start : start + BATCH]
        for start in range(0, SAMPLES // 2, BATCH)
        for worker in range(2)
    ]
    assert seen == [sample for batch in in_turns for sample in batch]

    loader = resumed({})
    for number, _ in enumerate(loader, 1):
        if number == len(in_turns) - 1:  # one of the two workers has read its last sample
            end = loader.state_dict()
    assert [batch.tolist() for batch in resumed(end)] == [list(in_turns[-1])]

    snapshot = state["_snapshot"]
    places = [of_one["dataset_state"] for of_one in snapshot["_worker_snapshots"].values()]
    print(f"state after part 2, one entry for each worker: {places}")
    assert sum(place["next"] for place in places) == 2 * STOP * BATCH  # no read-ahead counts
    for workers in (1, 0):
        try:
            next(iter(resumed(state, workers)))
        except AssertionError as error:
            print(f"loaded with {workers} workers: AssertionError: {error}".rstrip())
        else:
            raise AssertionError("a different number of workers was accepted")

    left = SAMPLES - 2 * STOP * BATCH
    for resets in (True, False):
        for persistent in (True, False):
            loader = resumed(state, resets=resets, persistent_workers=persistent)
            epochs = [sum(len(batch) for batch in loader) for _ in range(3)]
            how = "resets its place" if resets else "keeps its place"
            workers = "persistent workers" if persistent else "new workers"
            print(f"{workers}, a dataset that {how}: epochs of {epochs} samples")
            empty = persistent and not resets
            assert epochs == ([left, 0, 0] if empty else [left, SAMPLES, SAMPLES])

    reads = reads_of_a_resume(WithoutState())
    print(f"dataset without state_dict: {reads} samples read to get a batch of {BATCH}")
    assert reads == (STOP + 1) * BATCH


if __name__ == "__main__":
    main()
