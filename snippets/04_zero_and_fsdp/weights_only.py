"""Weights only load failed: torch.load refuses a file with a class that is not on its list.

torch.save pickles any object, and a pickle may name any function, which is called while the
file is read. So by default torch.load builds tensors, containers and numbers. It builds other
objects only if you allow them by name. The first file names argparse.Namespace, which is
harmless. The last two files name print, to show that a file could name any function.

Look at the last two lines, which are printed by the files: one by torch.load with
weights_only=False, and one by dcp.load, which reads its metadata with pickle.
"""

import argparse
import contextlib
import pickle
import tempfile
import warnings
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

warnings.filterwarnings("ignore", message="torch.distributed is disabled")


class Trap:
    """An object that is pickled as a call of print."""

    def __init__(self, reader: str) -> None:
        self.reader = reader

    def __reduce__(self) -> tuple:
        return print, (f"{self.reader}: this call was in the file",)


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
    torch.save({"model": weights, "arguments": Trap("with weights_only=False")}, path)
    try:
        torch.load(path)
        raise AssertionError("the call was made")
    except UnpicklingError:
        print(f"an untrusted file names {get_unsafe_globals_in_checkpoint(path)}")
    torch.load(path, weights_only=False)

    dcp.save({"model": weights}, checkpoint_id=folder / "dcp")
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(Trap("dcp.load")))
    with contextlib.suppress(Exception, CheckpointException):  # dcp.load fails after the call
        dcp.load({"model": weights}, checkpoint_id=folder / "dcp")
    # --8<-- [end:trap]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
