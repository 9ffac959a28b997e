"""Bus error, and "unable to allocate shared memory": a DataLoader whose /dev/shm is too small.

A worker puts its batch into shared memory. torch asks for the room first, and where there is
none it says so. Code that does not ask (a library's own buffers, an array on a file) is killed
in the middle of a write: an address was promised which no memory stands behind.
"""

import mmap
import os
import re
import sys
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    """Eight samples of a quarter MiB."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256, 256), float(index))


class Huge(Samples):
    """Samples of which four are more than all of /dev/shm. One number, seen many times."""

    def __getitem__(self, index: int) -> torch.Tensor:
        room = os.statvfs("/dev/shm")
        return torch.zeros(1, dtype=torch.uint8).expand(room.f_blocks * room.f_frsize // 4 + 1)


class Promised(Samples):
    """Small samples, after a write to a mapped file that has become too short."""

    def __getitem__(self, index: int) -> torch.Tensor:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)
            memory[0] = 1
        return super().__getitem__(index)


def first_cause(error: BaseException) -> str:
    """The message at the root: "exited unexpectedly" may stand before the signal's name."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    # the error of a worker comes with its traceback, and ends with the message
    return str(error).splitlines()[-1].removeprefix("RuntimeError: ")


def epoch(name: str, data: Dataset, workers: int) -> str:
    """Add up an epoch; print and return what came of it."""
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    try:
        batches = list(DataLoader(data, batch_size=4, **options))
        shared = sum(batch.nbytes for batch in batches if batch.is_shared()) / 2**20
        total = sum(batch.mean().item() for batch in batches)
        said = f"{shared:g} MiB shared, the batches' means add up to {total:g}"
    except RuntimeError as error:
        said = first_cause(error)
        said = re.sub(
            r"pid(\(s\))? [\d, ]+", "pid …", re.sub(r"</torch_\w+>", "</torch_…>", said)
        )
    print(f"{name}\n  {said}")
    return said


def main() -> None:
    if sys.platform != "linux":
        sys.exit("this program is about Linux's shared memory")
    said = epoch("a batch larger than /dev/shm", Huge(), workers=1)
    assert "unable to allocate shared memory(shm)" in said and "No space left" in said
    said = epoch("an address that no memory stands behind", Promised(), workers=1)
    assert "is killed by signal: Bus error" in said
    assert epoch("batches for which there is room", Samples(), workers=1).startswith("2 MiB")
    assert epoch("no worker, so nothing is shared", Samples(), workers=0).startswith("0 MiB")


if __name__ == "__main__":
    main()
