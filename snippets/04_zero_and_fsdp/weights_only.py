"""Weights only load failed: a checkpoint names a class, and torch.load refuses to look it up.

torch.save pickles whatever it is given, and a pickle may name any function, to be called while
the file is read. So torch.load builds tensors, containers and numbers, and nothing else, unless
it is told the names of what may be built too. The first file names argparse.Namespace, which is
harmless; the third names print, and shows that it could have named anything.
"""

import argparse
import tempfile
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals


class Trap:
    """What a stranger's file may hold: it is pickled as a call."""

    def __reduce__(self) -> tuple:
        return print, ("with weights_only=False: this ran while the file was read",)


def main(folder: Path) -> None:
    weights = torch.nn.Linear(2, 2).state_dict()
    arguments = argparse.Namespace(lr=1e-3)
    path = folder / "checkpoint.pt"

    # --8<-- [start:refused]
    torch.save({"model": weights, "arguments": arguments}, path)
    try:
        torch.load(path)
    except UnpicklingError as error:
        for sentence in ("Weights only load failed.", "WeightsUnpickler error"):
            line = next(each for each in str(error).splitlines() if sentence in each)
            print(line.strip().split(" This")[0].split(" by default")[0])
    # --8<-- [end:refused]

    # --8<-- [start:fixes]
    print(f"it names {get_unsafe_globals_in_checkpoint(path)}")
    with safe_globals([argparse.Namespace]):
        loaded = torch.load(path)["arguments"]
    print(f"with safe_globals: {loaded}")
    torch.save({"model": weights, "arguments": vars(arguments)}, path)
    print(f"saved as a dictionary: {torch.load(path)['arguments']}")
    # --8<-- [end:fixes]
    assert loaded == arguments and torch.load(path)["arguments"] == vars(arguments)

    # --8<-- [start:trap]
    torch.save({"model": weights, "arguments": Trap()}, path)
    try:
        torch.load(path)
        raise AssertionError("the call was made")
    except UnpicklingError:
        print(f"a stranger's names {get_unsafe_globals_in_checkpoint(path)}")
    torch.load(path, weights_only=False)
    # --8<-- [end:trap]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
