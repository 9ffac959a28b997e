"""After a restart, two ranks resume from different steps, and no collective raises an error.

Each node saves on its own disk. Node 1 was cut off before its last save, and the disk of node 0
was full at the save before that. Therefore the newest step that both nodes have is older than
the newest step of each node. If every rank resumes from its own newest checkpoint, the replicas
are different, but their gradients are summed anyway. The rank that is ahead ends with success.
The rank that is behind gets an error.

    newest    each rank resumes from its own newest checkpoint: the weights are wrong
    common    the ranks agree on the newest step that all of them have, before they load it

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
from unittest import mock

import torch
import torch.distributed as dist

RANKS, STEPS, ON_DISK = 2, 12, {0: [0, 3, 9], 1: [0, 3, 6]}  # the saved steps, by rank


# --8<-- [start:agree]
def newest_common(steps: list[int]) -> int:
    """The newest step that every rank has on its disk, or 0 if there is no such step."""
    all_steps: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_steps, steps)
    return max(set.intersection(*map(set, all_steps)), default=0)


# --8<-- [end:agree]


def saved_steps(disk: Path) -> list[int]:
    return [int(path.stem) for path in disk.iterdir()]


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
    """The step from which this rank resumed, how it ended, and its weights."""
    steps = saved_steps(disk)
    first = newest_common(steps) if how == "common" else max(steps)
    if how == "common":
        assert newest_common([rank + 1]) == 0  # the ranks have no common step
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


def resume_and_report(rank: int, folder: Path, how: str) -> None:
    end = resume(rank, folder.parent / f"disk.{rank}", how)
    (folder / f"{rank}").write_bytes(pickle.dumps(end))


def fork_rank_without_stderr(rank: int, folder: Path, work: Callable, *rest) -> int:
    """Start a process that runs `work(rank, folder, *rest)` as this rank. Return its pid."""
    if pid := os.fork():
        return pid
    try:
        signal.alarm(600)  # in any case, the rank ends after this time
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # gloo prints errors when it ends
        store = dist.FileStore(str(folder / "store"), RANKS)
        timeout = timedelta(seconds=300)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
        )
        work(rank, folder, *rest)
        os._exit(0)
    finally:
        os._exit(1)


def wait_for(ranks: list[int]) -> list[int]:
    """Exit statuses, below 0 for a signal. After an interrupt, the ranks end too."""
    statuses: list[int] = []
    try:
        for pid in ranks:
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses
    finally:
        for pid in ranks[len(statuses) :]:
            os.kill(pid, signal.SIGKILL)


def check_three_ranks() -> None:
    """Every pair of these ranks has a newer common step, so no rank may leave one out."""
    disks = [[3, 9, 6], [3, 6, 8], [3, 8, 9]]

    def gather(all_steps: list, steps: list[int]) -> None:
        all_steps[:] = disks

    with mock.patch.multiple(dist, get_world_size=lambda: 3, all_gather_object=gather):
        assert [newest_common(steps) for steps in disks] == [3, 3, 3]


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("which_checkpoint.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank, steps in ON_DISK.items():
            disk = folder / f"disk.{rank}"
            disk.mkdir()
            for step in steps:
                torch.save(undisturbed(step), disk / f"{step}.pt")
            print(f"rank {rank} has checkpoints of steps {steps}")
        two = folder / "two digits"
        two.mkdir()
        for step in (9, 12):
            (two / f"{step}.pt").touch()
        assert max(saved_steps(two)) == 12  # the text "9" would be larger
        for how in ("newest", "common"):
            reports = folder / how
            reports.mkdir()
            ranks = [
                fork_rank_without_stderr(rank, reports, resume_and_report, how)
                for rank in range(RANKS)
            ]
            assert not any(wait_for(ranks))
            ends = [pickle.loads((reports / f"{rank}").read_bytes()) for rank in range(RANKS)]
            print(how)
            right = undisturbed(STEPS)
            assert not torch.equal(advance(right, 1, 0), advance(right, 1, 1))  # different rows
            for rank, (first, end, weights) in enumerate(ends):
                error = (weights - right).abs().max().item()
                result = "correct weights" if error < 1e-5 else f"weights wrong by ≈{error:.3f}"
                print(f"  rank {rank} resumed from step {first}: {end}, {result}")
                assert (error < 1e-5) == (how == "common") and (how == "common" or error > 1e-3)
            if how == "newest":
                assert [end for _, end, _ in ends] == [
                    "done",
                    "step 10: Connection closed by peer",
                ]
                models = [undisturbed(9), undisturbed(6)]
                for step in (1, 2, 3):  # gradients of two models and two steps are summed
                    total = advance(models[0], 9 + step, 0) + advance(models[1], 6 + step, 1)
                    models = [weights - 0.05 * total for weights in models]
                for (_, _, weights), model in zip(ends, models, strict=True):
                    torch.testing.assert_close(weights, model)
    check_three_ranks()


if __name__ == "__main__":
    main()
