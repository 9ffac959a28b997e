"""A rank is killed while it saves: writing over the old checkpoint mixes two models.

Two ranks save step 1, and then they save step 2. In the second save, rank 1 is killed by
SIGKILL after rank 0 has written its file and before rank 1 writes its own. The program starts
the ranks itself and then loads what is on the disk.

overwrite: both saves use the same folder. The metadata of step 1 still describes the files, so
the load succeeds. It returns a model that never existed.

new_folder: each save uses a new folder. A complete folder gets its final name by one rename.
A pointer file contains the name of the latest checkpoint, and a rename replaces it, too.

As a control, both functions also run without a kill, and then step 2 is loaded. Before the
control of new_folder, the program creates a folder of step 2 that no pointer names.
A job that was killed between the two renames leaves such a folder.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = 8
KILL = "KILL_RANK_1"  # an environment variable, so that the ranks inherit it


class KilledAt2(dcp.FileSystemWriter):
    """The writer of DCP. If `KILL` is set, rank 1 is killed in the save of step 2."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        self.step = step

    def write_data(self, plan, planner):
        kill = self.step == 2 and os.environ.get(KILL)
        if kill and dist.get_rank() == 1:
            dist.barrier()  # rank 0 has written its file
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(plan, planner)
        if kill:
            written.wait()
            dist.barrier()
        return written


def overwrite(state: dict, step: int) -> None:
    """Wrong: all saves use the same folder."""
    dcp.save(state, storage_writer=KilledAt2(Path("overwrite"), step))


def new_folder(state: dict, step: int) -> None:
    """Right: write to a new folder, and rename it when it is complete."""
    root = Path("new_folder")
    unfinished, finished = root / f"step-{step}.unfinished", root / f"step-{step}"
    pointer = root / "latest"
    if pointer.exists() and pointer.read_text() == finished.name:
        return  # this step is saved already; a second copy would have to delete it first
    dcp.save(state, storage_writer=KilledAt2(unfinished, step))  # returns when all ranks finish
    if dist.get_rank() == 0:
        if finished.exists():  # left by a job that was killed before it wrote the pointer
            shutil.rmtree(finished)
        unfinished.rename(finished)  # happens completely or not at all
        (root / "latest.new").write_text(finished.name)
        (root / "latest.new").replace(pointer)  # readers see the old or the new text
    dist.barrier()  # no rank continues before the rename


def latest() -> Path | None:
    """The newest complete checkpoint, or None. Incomplete folders are removed."""
    root = Path("new_folder")
    for folder in root.glob("*.unfinished"):
        shutil.rmtree(folder)
    pointer = root / "latest"
    return root / pointer.read_text() if pointer.exists() else None


def work(rank: int, save, store: str) -> None:
    """One rank: save a weight whose elements are all 1, then 2, then 3."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for step, value in ((1, 1), (2, 2), (2, 3)):  # step 2 is saved twice
        weight = distribute_tensor(torch.full((ROWS, 4), float(value)), mesh, [Shard(0)])
        save({"weight": weight, "step": torch.tensor(step)}, step)


def read(folder: Path) -> tuple[int, list[int]]:
    """The step and the first column of the weight, loaded in one process."""
    state = {"weight": torch.zeros(ROWS, 4), "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["step"].item(), state["weight"][:, 0].int().tolist()


def run(save) -> int:
    """Run both ranks until they end; return the exit code of rank 1."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=work, args=(rank, save, f"{folder}/store"))
            for rank in range(2)
        ]
        silent, stderr = os.open(os.devnull, os.O_WRONLY), os.dup(2)
        os.dup2(silent, 2)  # hides the traceback of rank 0, whose peer is gone
        for process in ranks:
            process.start()
        os.dup2(stderr, 2)
        ranks[1].join()
        ranks[0].join(20)
        ranks[0].kill()
        ranks[0].join()
    return ranks[1].exitcode


def main() -> None:
    if len(sys.argv) > 1 or "RANK" in os.environ:
        sys.exit("start this with: python killed_save.py (it starts its two ranks itself)")
    for save in (overwrite, new_folder):
        root = Path(save.__name__)
        if save is new_folder:
            (root / "step-2" / "from a killed job").mkdir(parents=True)
            assert latest() is None
        assert run(save) == 0  # the control: without a kill, step 2 is complete
        # new_folder keeps the first complete copy of step 2, and overwrite replaces it
        value = 2 if save is new_folder else 3
        assert read(latest() if save is new_folder else root) == (2, [value] * ROWS)
        shutil.rmtree(root)

        os.environ[KILL] = "yes"
        killed = signal.Signals(-run(save)).name
        del os.environ[KILL]
        print(f"{root}: rank 1 ended by {killed} in the save of step 2")
        for entry in sorted(root.rglob("*")):
            if entry.is_file():
                print(f"  {entry.relative_to(root)}")
        folder = latest() if save is new_folder else root
        step, rows = read(folder)
        print(f"  loaded from {folder}: step {step}, rows {rows}")
        mixed = [2] * (ROWS // 2) + [1] * (ROWS // 2)
        assert (step, rows) == (1, mixed if save is overwrite else [1] * ROWS)

    assert not list(Path("new_folder").glob("*.unfinished"))
    Path("new_folder/step-9").mkdir()  # a folder that the pointer does not name
    assert latest().name == "step-1"
    writer = dcp.FileSystemWriter("overwrite", overwrite=False)
    try:
        dcp.save({"step": torch.tensor(3)}, storage_writer=writer, no_dist=True)
    except CheckpointException as error:
        (cause, _) = error.failures[0]
        print(f"with overwrite=False, the save raises {type(error).__name__}: {cause}")


if __name__ == "__main__":
    main()
