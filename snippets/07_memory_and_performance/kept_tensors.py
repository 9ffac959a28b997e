"""received 0 items of ancdata, Too many open files: each kept tensor keeps a file open.

A worker of a DataLoader hands a tensor over in shared memory, and sends a file descriptor of
that memory. The descriptor stays open until the tensor is freed. The program lowers the limit
of open files and keeps one tensor of every batch. Look at the descriptors per kept tensor: 1
with the default of Linux, and 0 with each of two fixes. A third fix raises the limit.

Linux only. Other systems do not send file descriptors.
"""

import gc
import os
import resource
import sys

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

BATCHES, ROOM = 120, 60  # the limit leaves room for 60 more open files


class Numbers(Dataset):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def first_of(error: BaseException) -> BaseException:
    """The first error of a chain. The others were raised while it was being handled."""
    while error.__context__ is not None:
        error = error.__context__
    return error


# --8<-- [start:keep]
def keep(clone: bool) -> tuple[list[bool], float, str]:
    """Return which kept batches share memory, descriptors per kept batch, and the error."""
    kept, counts, said = [], [], "no error"
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    try:
        for batch in loader:
            kept.append(batch.clone() if clone else batch)  # an evaluation, or a list of losses
            counts.append(open_files())
    except (RuntimeError, OSError) as error:
        said = f"{error}. The first error was: {first_of(error)}"
    grown = (counts[30] - counts[10]) / 20  # far from the start and from the limit
    for number, batch in enumerate(kept):  # what was kept is what the worker made
        assert batch[0, 0] == 2 * number and batch[1, 2] == 2 * number + 1
    return [batch.is_shared() for batch in kept], grown, said


# --8<-- [end:keep]


def main() -> None:
    if not sys.platform.startswith("linux"):
        sys.exit("kept_tensors.py needs Linux: other systems do not send file descriptors")
    torch.set_num_threads(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < open_files() + ROOM + BATCHES:
        sys.exit(f"kept_tensors.py needs a hard limit above {hard} open files")
    ways = {  # sharing strategy, clone, room for open files
        "kept as it is": ("file_descriptor", False, ROOM),
        "clone()": ("file_descriptor", True, ROOM),
        "file_system": ("file_system", False, ROOM),
        "ulimit -n, raised": ("file_descriptor", False, ROOM + BATCHES),
    }
    for title, (strategy, clone, room) in ways.items():
        torch.multiprocessing.set_sharing_strategy(strategy)
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files() + room, hard))
        shared, grown, said = keep(clone)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        gc.collect()  # frees the failed iterator and the tensors of this case
        kept = len(shared)
        assert shared == [title != "clone()"] * kept  # a clone is in ordinary memory
        ends = f"all {BATCHES} kept" if kept == BATCHES else f"ends after ≈{kept}"
        print(f"{title}: {grown:.0f} descriptor per kept tensor, {ends}")
        if title == "kept as it is":
            for sentence in said.split(". "):
                print(f"  {sentence}")
            assert "Too many open files" in said and "received 0 items of ancdata" in said
            assert ROOM / 2 < kept < ROOM and grown == 1
        else:
            assert kept == BATCHES and said == "no error"
            assert grown == (0 if room < BATCHES else 1)  # with little room, no file stays open


if __name__ == "__main__":
    main()
