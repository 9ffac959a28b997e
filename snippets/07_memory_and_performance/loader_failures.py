"""Three ways in which DataLoader workers fail: an exception, a kill, unequal shapes.

The program provokes each failure. The first error contains the traceback of the worker. The
second error contains no traceback, because the process was killed from outside of Python.
"""

import gc
import multiprocessing
import os
import re
import signal

import torch
from torch.utils.data import DataLoader, Dataset, Subset

KILLED = re.compile(r"\(pid [0-9]+\) is killed by|\(pid\(s\) [0-9]+\) exited unexpectedly")


# --8<-- [start:datasets]
class Corrupt(Dataset):
    """Sample 5 cannot be decoded."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError(f"sample {index}: not a JPEG file")
        return torch.zeros(2)


class TooLarge(Corrupt):
    """Sample 5 stands for a sample that needs too much memory: Linux kills the process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(2)


class Ragged(Corrupt):
    """Samples of different lengths."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2 + index % 2)


# --8<-- [end:datasets]


def attempt(title: str, dataset: Dataset) -> None:
    """Run an epoch and print the error's last line."""
    try:
        for _ in DataLoader(dataset, batch_size=4, num_workers=1):
            pass
    except Exception as error:
        lines = str(error).strip().splitlines()
        if KILLED.search(lines[0]):  # a race: the signal's handler, or the reader of the queue
            lines = [
                "DataLoader worker (pid …) is killed by signal, or: (pid(s) …) exited "
                "unexpectedly"
            ]
        shown = [lines[0]] if len(lines) == 1 else [lines[0], lines[-1]]
        print(title)
        print(f"  {type(error).__name__}: {shown[0]}")
        for line in shown[1:]:
            print(f"  … {line}")
    gc.collect()  # the failed iterator, before the next workers are forked


def main() -> None:
    torch.set_num_threads(1)
    attempt("an exception in __getitem__", Corrupt())
    others = Subset(Corrupt(), [0, 1, 2, 3, 4, 6, 7])
    assert sum(len(batch) for batch in DataLoader(others, batch_size=4)) == 7
    attempt("a worker killed, as when memory runs out", TooLarge())
    process = multiprocessing.get_context("fork").Process(
        target=TooLarge().__getitem__, args=[5]
    )
    process.start(), process.join()
    assert process.exitcode == -signal.SIGKILL  # no line of Python ran after it
    attempt("samples of unequal size", Ragged())


if __name__ == "__main__":
    main()
