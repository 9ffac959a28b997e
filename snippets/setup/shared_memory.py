"""Reproduces "Bus error" and "unable to allocate shared memory" in a DataLoader.

A worker writes its batch into shared memory. torch first reserves the space, and raises an
error if /dev/shm is too small. Other code may write without reserving the space, for example
into an array that is mapped to a file. The system then kills the worker with a bus error.
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
    """Samples of which four need more than all of /dev/shm. Each repeats one number."""

    def __getitem__(self, index: int) -> torch.Tensor:
        size = os.statvfs("/dev/shm")
        return torch.zeros(1, dtype=torch.uint8).expand(size.f_blocks * size.f_frsize // 4 + 1)


class Shortened(Samples):
    """Small samples, after a write to a mapped file that was shortened."""

    def __getitem__(self, index: int) -> torch.Tensor:
        with tempfile.TemporaryFile() as file:
            file.truncate(mmap.PAGESIZE)
            memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
            file.truncate(0)  # the address stays valid, but no memory belongs to it
            memory[0] = 1
        return super().__getitem__(index)


def first_cause(error: BaseException) -> str:
    """Return the message of the first error, which contains the name of the signal."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    # the error of a worker begins with a traceback and ends with the message
    return str(error).splitlines()[-1].removeprefix("RuntimeError: ")


def epoch(name: str, data: Dataset, workers: int) -> str:
    """Read an epoch. Print and return the sizes and sums, or the error."""
    options = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    try:
        batches = list(DataLoader(data, batch_size=4, **options))
        shared = sum(batch.nbytes for batch in batches if batch.is_shared()) / 2**20
        total = sum(batch.mean().item() for batch in batches)
        result = f"{shared:g} MiB in shared memory, the sum of the batches' means is {total:g}"
    except RuntimeError as error:
        result = re.sub(r"</torch_\w+>", "</torch_…>", first_cause(error))
        result = re.sub(r"pid(\(s\))? [\d, ]+", "pid …", result)
    print(f"{name}\n  {result}")
    return result


def main() -> None:
    if sys.platform != "linux":
        sys.exit("shared_memory.py needs Linux")
    result = epoch("a batch that is larger than /dev/shm", Huge(), workers=1)
    assert "unable to allocate shared memory(shm)" in result and "No space left" in result
    result = epoch("a write to an address without memory", Shortened(), workers=1)
    assert "is killed by signal: Bus error" in result
    assert epoch("small batches from a worker", Samples(), workers=1).startswith("2 MiB")
    assert epoch("small batches without a worker", Samples(), workers=0).startswith("0 MiB")


if __name__ == "__main__":
    main()
