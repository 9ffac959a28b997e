"""A rank killed while it saves: overwriting loses the old checkpoint, a rename never does.

Two ranks save step 1, train, and save step 2. In the second save rank 1 is killed (SIGKILL)
after rank 0 has written its file and before rank 1 has written its own: half of the checkpoint
is there. This program starts and mourns the ranks itself, and then loads what they left.

overwrite: both saves go to one folder. The metadata of step 1 still describes the files, so the
load succeeds, and returns a model that never existed.

new folder: each save goes to a folder of its own, which gets its name by one rename when it
is complete; a pointer file, replaced by one rename too, says which is the latest.
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

ROWS = 8


class KilledAt2(dcp.FileSystemWriter):
    """DCP's writer, of which rank 1 is killed at step 2, when rank 0 has written its file."""

    def __init__(self, folder: Path, step: int) -> None:
        super().__init__(folder)
        self.step = step

    def write_data(self, plan, planner):
        if self.step == 2 and dist.get_rank() == 1:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write_data(plan, planner)
        if self.step == 2:
            written.wait()
            dist.barrier()
        return written


def overwrite(state: dict, step: int) -> None:
    """The trap: always the same folder."""
    dcp.save(state, storage_writer=KilledAt2(Path("overwrite"), step))


def new_folder(state: dict, step: int) -> None:
    """The fix: write to one side, and name it when it is whole."""
    root = Path("new_folder")
    unfinished, finished = root / f"step-{step}.unfinished", root / f"step-{step}"
    dcp.save(state, storage_writer=KilledAt2(unfinished, step))  # returns when all have written
    if dist.get_rank() == 0:
        unfinished.rename(finished)  # one operation of the file system: done or not done
        (root / "latest.new").write_text(finished.name)
        (root / "latest.new").replace(root / "latest")  # readers see the old or the new
    dist.barrier()  # nobody goes on before the checkpoint has its name


def latest() -> Path:
    """The newest complete checkpoint; what a killed save left is removed."""
    root = Path("new_folder")
    for rest in root.glob("*.unfinished"):
        shutil.rmtree(rest)
    return root / (root / "latest").read_text()


def work(rank: int, save, store: str) -> None:
    """One rank: the weight is filled with 1 at step 1 and with 2 at step 2, and saved."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        weight = distribute_tensor(torch.full((ROWS, 4), float(step)), mesh, [Shard(0)])
        save({"weight": weight, "step": torch.tensor(step)}, step)


def read(folder: Path) -> str:
    """Load in one process, and say what came."""
    state = {"weight": torch.zeros(ROWS, 4), "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return f"step {state['step'].item()}, rows {state['weight'][:, 0].int().tolist()}"


def main() -> None:
    if len(sys.argv) > 1 or "RANK" in os.environ:
        sys.exit("start this with: python killed_save.py (it starts its two ranks itself)")
    context = multiprocessing.get_context("fork")
    for save in (overwrite, new_folder):
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=work, args=(rank, save, f"{folder}/store"))
                for rank in range(2)
            ]
            silent, saved = os.open(os.devnull, os.O_WRONLY), os.dup(2)
            os.dup2(silent, 2)  # the survivor's traceback about its lost peer
            for process in ranks:
                process.start()
            os.dup2(saved, 2)
            ranks[1].join()
            ranks[0].join(20)
            ranks[0].kill()
            ranks[0].join()
        killed = signal.Signals(-ranks[1].exitcode).name
        print(f"{save.__name__}: rank 1 ended by {killed} in the save of step 2")
        for entry in sorted(Path(save.__name__).rglob("*")):
            if entry.is_file():
                print(f"  {entry.relative_to(save.__name__)}")
        folder = Path("overwrite") if save is overwrite else latest()
        print(f"  loaded from {folder}: {read(folder)}")
    assert not list(Path("new_folder").glob("*.unfinished"))
    Path("new_folder/step-9").mkdir()  # it has its name, and is not pointed to yet
    assert latest().name == "step-1"


if __name__ == "__main__":
    main()
