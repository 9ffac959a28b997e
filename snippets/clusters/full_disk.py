"""The disk fills while a checkpoint is written: the old one is lost, unless it is not touched.

Two ranks train and rank 0 saves every second step. At step 4 no file may grow beyond 64 KiB any
more (RLIMIT_FSIZE): a write then fails with a true error of the kernel, as on a full disk.

    naive     torch.save over the old file: that is lost, rank 0 ends, rank 1 blames the network
    careful   write beside it, flush, rename; a failed save is reported to all, and training
              goes on with the old checkpoint until there is room again

    --on FOLDER    the same on a file system that is really small (size=600k): see the page

The ranks are forked, so torch is imported once. Linux and macOS only.
"""

import errno
import io
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

RANKS, STEPS, EVERY, FULL, ROOM_AGAIN = 2, 8, 2, 4, 7
SMALL = "--on" in sys.argv


# --8<-- [start:save]
def save_naively(state: dict, path: Path) -> None:
    torch.save(state, path)  # opens the file for writing: from here on the old one is gone


def save_carefully(state: dict, path: Path) -> OSError | None:
    """Replace `path` as a whole or not at all; on every rank what went wrong on rank 0."""
    failed = None
    if dist.get_rank() == 0:
        temporary = path.with_suffix(".tmp")
        buffer = io.BytesIO()
        torch.save(state, buffer)
        try:
            with temporary.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())  # a full disk may say so only here, or at close
            os.replace(temporary, path)
            entries = os.open(path.parent, os.O_RDONLY)
            os.fsync(entries)  # the new name, too, is on the disk before anybody relies on it
            os.close(entries)
        except OSError as error:
            failed = error
            temporary.unlink(missing_ok=True)  # gives the room back
    told = [failed]
    dist.broadcast_object_list(told, src=0)  # all ranks go on together, or stop together
    return told[0]


# --8<-- [end:save]


def fill(full: bool, folder: Path) -> None:
    """Let the disk be full, or have room again."""
    log = folder / "log"
    if SMALL:
        if full:
            room = os.statvfs(folder)
            log.write_bytes(bytes(room.f_bavail * room.f_frsize))
        else:
            log.unlink()
    else:
        import resource  # not on Windows

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10 if full else hard, hard))


def train(rank: int, folder: Path, careful: bool) -> list[str]:
    """What this rank has to say of the run."""
    path, said = folder / "checkpoint.pt", []
    weights = torch.zeros(50_000)  # 200 kB
    losses = torch.zeros(0)
    for step in range(1, STEPS + 1):
        if rank == 0 and step in (FULL, ROOM_AGAIN):
            fill(step == FULL, folder)
        gradient = torch.full_like(weights, step + rank)
        try:
            dist.all_reduce(gradient)
        except RuntimeError as error:
            closed = re.search(
                "Connection closed by peer|reset by peer|Broken pipe", str(error)
            )
            return [*said, f"step {step}: " + ("Connection closed by peer" if closed else "?")]
        weights -= 0.1 * gradient
        if step % EVERY == 0:
            losses = torch.cat([losses, torch.ones(5_000)])  # a checkpoint that grows
            state = {"step": step, "weights": weights, "losses": losses}
            if careful:
                error = save_carefully(state, path)
                what = f"not saved, {errno.errorcode[error.errno]}" if error else "saved"
                said.append(f"step {step}: {what}")
            elif rank == 0:
                try:
                    save_naively(state, path)
                    said.append(f"step {step}: saved")
                except (OSError, RuntimeError) as error:
                    text = re.sub(r"(\d+)", r"≈\1", str(error).split("] . ")[-1])
                    return [*said, f"step {step}: {type(error).__name__}: {text}"]
        if careful and step == ROOM_AGAIN - 1:  # had the run been killed while it was full
            dist.barrier()
            said.append(f"on disk: {look(path)}, {sorted(p.name for p in folder.iterdir())}")
            dist.barrier()  # nobody changes the disk before both have looked
    return said


def look(path: Path) -> str:
    """What a resume would find."""
    try:
        state = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError):
        return "nothing that can be read"
    # each step adds (step + 0) + (step + 1), times 0.1
    right = -0.1 * sum(2 * step + 1 for step in range(1, state["step"] + 1))
    torch.testing.assert_close(state["weights"], torch.full((50_000,), right))
    return f"step {state['step']}"


def train_and_tell(rank: int, files: Path, folder: Path, careful: bool) -> None:
    (files / f"said.{rank}").write_text("\n".join(train(rank, folder, careful)))


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
        sys.exit("full_disk.py forks its ranks: it needs Linux or macOS")
    torch.set_num_threads(1)
    for careful in (False, True):
        print("careful" if careful else "naive")
        with tempfile.TemporaryDirectory() as name:
            files = Path(name)
            folder = Path(sys.argv[sys.argv.index("--on") + 1]) if SMALL else files / "disk"
            folder.mkdir(exist_ok=True)
            ranks = [
                fork_quiet_rank(rank, files, train_and_tell, folder, careful)
                for rank in range(RANKS)
            ]
            assert wait_for(ranks) == [0, 0]
            said = [(files / f"said.{rank}").read_text().splitlines() for rank in range(RANKS)]
            for line in said[0]:
                print(f"  rank 0, {line}")
            if careful:
                assert said[1] == said[0]  # rank 1 knows all that rank 0 knows
            else:
                print(f"  rank 1, {said[1][-1]}")
            found = look(folder / "checkpoint.pt")
            print(f"  a resume finds: {found}")
            assert found == ("step 8" if careful else "nothing that can be read")
            assert not list(folder.glob("*.tmp"))
            for file in folder.iterdir():
                file.unlink()
    assert said[0][1:4] == [
        f"step 4: not saved, {'ENOSPC' if SMALL else 'EFBIG'}",
        f"step 6: not saved, {'ENOSPC' if SMALL else 'EFBIG'}",
        f"on disk: step 2, ['checkpoint.pt'{', ' + repr('log') if SMALL else ''}]",
    ]


if __name__ == "__main__":
    main()
