"""After a restart two ranks resume from different steps, and nothing is raised.

Each node saves on a disk of its own. Node 1 was cut off before its last save, and the disk of
node 0 was full at the one before: the newest step that both have is older than the newest of
either. Every rank resumes from *its* newest: the replicas differ from the first
step on, and their gradients are summed all the same. The one that is ahead ends with success;
the other one, which is behind, gets the error.

    newest    each its own: wrong weights, and an error on the rank that made no mistake
    common    the newest step that all ranks have, agreed upon before anything is loaded

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import os
import pickle
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STEPS, KEPT = 2, 12, {0: [3, 9], 1: [3, 6]}  # the steps that each disk holds


# --8<-- [start:agree]
def newest_common(steps: list[int]) -> int:
    """The newest step that every rank has on its disk; 0, the start, if there is none."""
    everybodys: list = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, steps)
    return max(set.intersection(*map(set, everybodys)), default=0)


# --8<-- [end:agree]


def advance(weights: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """One rank's gradient of step `step`."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step * RANKS + rank))
    return x.T @ (x @ weights - x.sum(1)) / 6


def undisturbed(steps: int) -> torch.Tensor:
    weights = torch.zeros(4)
    for step in range(1, steps + 1):
        weights = weights - 0.05 * sum(advance(weights, step, rank) for rank in range(RANKS))
    return weights


def resume(rank: int, disk: Path, how: str) -> tuple[int, str, torch.Tensor]:
    """Where this rank began, how it ended, and its weights."""
    steps = [int(path.stem) for path in disk.iterdir()]
    first = newest_common(steps) if how == "common" else max(steps)
    weights = torch.load(disk / f"{first}.pt", weights_only=True)
    for step in range(first + 1, STEPS + 1):
        gradient = advance(weights, step, rank)
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            closed = re.search(
                "Connection closed by peer|reset by peer|Broken pipe", str(error)
            )
            return first, f"step {step}: {closed and 'Connection closed by peer'}", weights
        weights = weights - 0.05 * gradient
    return first, "done", weights


def resume_and_tell(rank: int, folder: Path, how: str) -> None:
    end = resume(rank, folder.parent / f"disk.{rank}", how)
    (folder / f"{rank}").write_bytes(pickle.dumps(end))


def fork_quiet_rank(rank: int, folder: Path, work: Callable, *given) -> int:
    """Start a process that is this rank, and runs `work(rank, folder, *given)`; its number."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # whatever happens, no rank outlives this
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what gloo says on its way out
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        work(rank, folder, *given)
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal; if this process is interrupted, they end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("which_checkpoint.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank, steps in KEPT.items():
            disk = folder / f"disk.{rank}"
            disk.mkdir()
            for step in steps:
                torch.save(undisturbed(step), disk / f"{step}.pt")
            print(f"rank {rank} has checkpoints of steps {steps}")
        for how in ("newest", "common"):
            told = folder / how
            told.mkdir()
            ranks = [fork_quiet_rank(rank, told, resume_and_tell, how) for rank in range(RANKS)]
            assert not any(wait_for(ranks))
            ends = [pickle.loads((told / f"{rank}").read_bytes()) for rank in range(RANKS)]
            print(how)
            right = undisturbed(STEPS)
            assert not torch.equal(advance(right, 1, 0), advance(right, 1, 1))  # own rows
            for rank, (first, end, weights) in enumerate(ends):
                far = (weights - right).abs().max().item()
                equal = "weights right" if far < 1e-5 else f"weights off by ≈{far:.3f}"
                print(f"  rank {rank} resumed from step {first}: {end}, {equal}")
                assert (far < 1e-5) == (how == "common") and (how == "common" or far > 1e-3)
            if how == "newest":
                assert [end for _, end, _ in ends] == [
                    "done",
                    "step 10: Connection closed by peer",
                ]


if __name__ == "__main__":
    main()
