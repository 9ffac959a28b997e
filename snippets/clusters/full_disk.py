"""Fills the disk during a save: the old checkpoint is lost, unless the save writes a new file.

Two ranks train, and rank 0 saves after every second step. From step 4 on, no file can grow
beyond 64 KiB (RLIMIT_FSIZE). A write then fails with an error of the kernel, as on a full disk.

    naive     torch.save over the old file: the file is lost, rank 0 ends, rank 1 reports an
              error of its connection
    careful   write a temporary file, flush, rename; a failed save is reported to all ranks, and
              training continues with the old checkpoint until the disk has space again

    --on FOLDER    the same on a file system that is really small (size=600k): see the page

At the end, the program records the calls of a careful save, because only their order makes the
new checkpoint safe against a power cut.

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import contextlib
import errno
import os
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

RANKS, STEPS, EVERY, FULL, SPACE_AGAIN = 2, 8, 2, 4, 7
SMALL = "--on" in sys.argv
UNREADABLE = "no checkpoint that can be read"


def save_naively(state: dict, path: Path) -> None:
    torch.save(state, path)  # opens the file for writing: now the old checkpoint is lost


def replace_file(state: dict, path: Path) -> None:
    """Write `state` to `path` as a whole, or leave the old file as it is."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)  # one tensor after another, so it needs no second copy
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)  # now the new name is on the disk, too
        os.close(folder)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # it exists only after an error


def save_carefully(state: dict, path: Path) -> str | None:
    """Save on rank 0. Return on every rank what went wrong on rank 0, or None."""
    report: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            replace_file(state, path)
        except Exception as error:  # every error, because the other ranks wait for the report
            report = [cause(error)]
    dist.broadcast_object_list(report, src=0)
    return report[0]


def cause(error: Exception) -> str:
    """The name of the system's error from which `error` follows, or else its type."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return errno.errorcode[link.errno] if link and link.errno else type(error).__name__


def fill(full: bool, folder: Path) -> None:
    """Fill the disk, or give it space again."""
    log = folder / "log"
    if SMALL:
        if full:
            space = os.statvfs(folder)
            log.write_bytes(bytes(space.f_bavail * space.f_frsize))
        else:
            log.unlink()
    else:
        import resource  # not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10 if full else hard, hard))


def train(rank: int, folder: Path, careful: bool) -> list[str]:
    """What this rank reports about the run."""
    path, reports = folder / "checkpoint.pt", []
    weights = torch.zeros(50_000)  # 200 kB
    losses = torch.zeros(0)
    for step in range(1, STEPS + 1):
        if rank == 0 and step in (FULL, SPACE_AGAIN):
            fill(step == FULL, folder)
        gradient = torch.full_like(weights, step + rank)
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            closed = re.search(
                "Connection closed by peer|reset by peer|Broken pipe", str(error)
            )
            message = "Connection closed by peer" if closed else "?"
            return [*reports, f"step {step}: {message}"]
        weights -= 0.1 * gradient
        if step % EVERY == 0:
            losses = torch.cat([losses, torch.ones(5_000)])  # a checkpoint that grows
            state = {"step": step, "weights": weights, "losses": losses}
            if careful:
                error = save_carefully(state, path)
                what = f"not saved, {error}" if error else "saved"
                reports.append(f"step {step}: {what}")
            elif rank == 0:
                try:
                    save_naively(state, path)
                    with mock.patch.object(torch, "save"):  # nothing else may change the file
                        save_naively(state, path)
                    assert look(path) == f"step {step}"  # until the next save destroys it
                    os.link(path, folder / "old")  # a second name of the same file
                    reports.append(f"step {step}: saved")
                except (OSError, RuntimeError) as error:
                    text = re.sub(r"(\d+)", r"≈\1", str(error).split("] . ")[-1])
                    return [*reports, f"step {step}: {type(error).__name__}: {text}"]
        if careful and step == SPACE_AGAIN - 1:  # what a kill would leave while it is full
            dist.barrier()
            reports.append(f"on disk: {look(path)}, {sorted(p.name for p in folder.iterdir())}")
            dist.barrier()  # both ranks look before the disk changes
    if careful:
        state = {"step": STEPS + 1, "schedule": lambda step: 0.1}  # pickle refuses a lambda
        failed = save_carefully(state, path) not in (None, *errno.errorcode.values())
        reports.append("a lambda in the state: " + ("not saved" if failed else "saved?"))
    return reports


def look(path: Path) -> str:
    """The checkpoint that a resume would find."""
    try:
        state = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError):
        return UNREADABLE
    # each step adds (step + 0) + (step + 1), times 0.1
    right = -0.1 * sum(2 * step + 1 for step in range(1, state["step"] + 1))
    torch.testing.assert_close(state["weights"], torch.full((50_000,), right))
    return f"step {state['step']}"


def train_and_report(rank: int, files: Path, folder: Path, careful: bool) -> None:
    (files / f"reports.{rank}").write_text("\n".join(train(rank, folder, careful)))


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


# --8<-- [start:order]
def calls_of_a_save(path: Path) -> list[str]:
    """The calls by which `replace_file` puts a checkpoint on the disk, in their order."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(number: int) -> None:
        status = os.fstat(number)
        is_folder = os.path.samestat(status, path.parent.stat())
        calls.append("fsync folder" if is_folder else f"fsync {status.st_size} bytes")
        fsync(number)

    def recording_replace(old: Path, new: Path) -> None:
        assert old.parent == new.parent  # a rename works only within one file system
        calls.append("rename")
        replace(old, new)

    with (
        mock.patch.object(os, "fsync", recording_fsync),
        mock.patch.object(os, "replace", recording_replace),
    ):
        replace_file({"weights": torch.zeros(5)}, path)
    return calls


# --8<-- [end:order]


def main() -> None:
    if not hasattr(os, "fork"):
        sys.exit("full_disk.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    for careful in (False, True):
        print("careful" if careful else "naive")
        with tempfile.TemporaryDirectory() as name:
            files = Path(name)
            folder = Path(sys.argv[sys.argv.index("--on") + 1]) if SMALL else files / "disk"
            folder.mkdir(exist_ok=True)
            ranks = [
                fork_rank_without_stderr(rank, files, train_and_report, folder, careful)
                for rank in range(RANKS)
            ]
            assert wait_for(ranks) == [0, 0]
            texts = [(files / f"reports.{rank}").read_text() for rank in range(RANKS)]
            reports = [text.splitlines() for text in texts]
            for line in reports[0]:
                print(f"  rank 0, {line}")
            if careful:
                assert reports[1] == reports[0]  # rank 1 has all reports of rank 0
            else:
                print(f"  rank 1, {reports[1][-1]}")
                assert look(folder / "old") == UNREADABLE  # the old file was overwritten
            found = look(folder / "checkpoint.pt")
            print(f"  a resume finds: {found}")
            assert found == ("step 8" if careful else UNREADABLE)
            assert (folder / "checkpoint.pt").exists()  # it is damaged, but it is not missing
            assert not list(folder.glob("*.tmp"))
            for file in folder.iterdir():
                file.unlink()
    assert reports[0][1:4] == [
        f"step 4: not saved, {'ENOSPC' if SMALL else 'EFBIG'}",
        f"step 6: not saved, {'ENOSPC' if SMALL else 'EFBIG'}",
        f"on disk: step 2, ['checkpoint.pt'{', ' + repr('log') if SMALL else ''}]",
    ]
    assert reports[0][-1] == "a lambda in the state: not saved"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "checkpoint.pt")
        calls = calls_of_a_save(path)
        size = path.stat().st_size
    assert calls == [f"fsync {size} bytes", "rename", "fsync folder"]  # the whole file
    print("the calls of a careful save: fsync of the whole file, rename, fsync of the folder")


if __name__ == "__main__":
    main()
