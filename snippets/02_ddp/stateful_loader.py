"""torchdata's StatefulDataLoader: resumed twice to the sample, and what its state is tied to.

The loader asks each worker's copy of the dataset for its state with every batch, so that what
was read ahead is not counted as seen. Look for the number of workers in the state, and for the
epochs after a resume.

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

SAMPLES, BATCH, STOP = 40, 4, 3  # batches of a life
warnings.filterwarnings("ignore", message="'set_vital'")  # torchdata 0.11 calls it
warnings.filterwarnings("ignore", message="This DataLoader will create")  # few cores here


class Stream(IterableDataset):
    """Every `workers`-th sample; `next` is the place of this worker's copy in its own."""

    def __init__(self, starts_anew: bool = True) -> None:
        self.next, self.starts_anew = 0, starts_anew

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        mine = range(SAMPLES)[info.id :: info.num_workers] if info else range(SAMPLES)
        while self.next < len(mine):
            self.next += 1  # before the yield: afterwards is when the next is asked for
            yield mine[self.next - 1]
        if self.starts_anew:
            self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def resumed(state: dict, workers: int = 2, starts_anew: bool = True, **options):
    loader = StatefulDataLoader(Stream(starts_anew), BATCH, num_workers=workers, **options)
    loader.load_state_dict(state)
    return loader


def main() -> None:
    seen: list[int] = []
    state: dict = {}  # an empty one is loaded as none
    for life in range(3):
        loader = resumed(state)
        for number, batch in enumerate(loader, 1):
            seen += batch.tolist()
            if number == STOP and life < 2:
                state = loader.state_dict()
                break
        print(f"life {life + 1}: {len(seen)} samples seen, {len(set(seen))} different")
    assert sorted(seen) == list(range(SAMPLES))

    snapshot = state["_snapshot"]
    places = [of_one["dataset_state"] for of_one in snapshot["_worker_snapshots"].values()]
    print(f"in the state of life 2, by worker: {places}")
    for workers in (1, 0):
        try:
            next(iter(resumed(state, workers)))
        except AssertionError as error:
            print(f"loaded with {workers} workers: AssertionError: {error}".rstrip())
        else:
            raise AssertionError("another number of workers was accepted")

    left = SAMPLES - 2 * STOP * BATCH
    for starts_anew in (True, False):
        loader = resumed(state, starts_anew=starts_anew, persistent_workers=True)
        epochs = [sum(len(batch) for batch in loader) for _ in range(3)]
        how = "starts anew at its end" if starts_anew else "stays at its end"
        print(f"persistent workers, a dataset that {how}: epochs of {epochs}")
        assert epochs == ([left, SAMPLES, SAMPLES] if starts_anew else [left, 0, 0])


if __name__ == "__main__":
    main()
