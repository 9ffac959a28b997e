"""Kills torchrun itself: its ranks continue to run, unless they asked Linux to end them.

The out-of-memory killer or an operator's `kill -9` can hit the launcher. A process cannot catch
SIGKILL, so torchrun cannot forward it, and each rank has its own session. The ranks therefore
continue to use memory, GPUs and ports, and the next job fails. In a container or under Slurm,
all processes of a job end together. On other machines, a rank can ask Linux for a signal when
its parent ends. If the launcher has ended before the rank asks, no signal ever comes. A rank
therefore compares the pid of its parent with the pid that the launcher passed to it.

    The ranks run this same file. They do not need torch, so they do not import it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


# --8<-- [start:rank]
# start with: sh -c 'LAUNCHER=$$ exec torchrun ...'
def end_with_parent() -> None:
    """Ask Linux to kill this process when the process that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["LAUNCHER"]):  # the parent ended before we asked
        os._exit(1)


def rank(folder: Path, fixed: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # like a program that saves first
    if fixed:
        end_with_parent()  # at the start, before torch is imported
    (folder / f"pid.{os.environ['RANK']}").write_text(str(os.getpid()))
    time.sleep(3600)  # training


# --8<-- [end:rank]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def operate(folder: Path, how: str) -> None:
    command = ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", __file__, str(folder), how]
    torchrun = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(folder)}
    )
    ranks: list[int] = []
    try:
        files = [folder / f"pid.{number}" for number in range(2)]
        ends = time.monotonic() + 600
        while not all(file.exists() and file.read_text() for file in files):
            assert torchrun.poll() is None and time.monotonic() < ends
            time.sleep(0.02)
        ranks = [int(file.read_text()) for file in files]
        own_sessions = [os.getsid(pid) == pid for pid in ranks]
        torchrun.kill()
        torchrun.wait()
        ends = time.monotonic() + (2 if how == "bare" else 600)
        while any(map(alive, ranks)) and time.monotonic() < ends:
            time.sleep(0.02)
        left = sum(map(alive, ranks))
        print(f"{how}: torchrun is killed, and {left} of its 2 ranks continue to run")
        assert left == (2 if how == "bare" else 0) and all(own_sessions)
    finally:
        torchrun.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def check_late_request(folder: Path) -> None:
    """Start a rank whose launcher has already ended, so its parent is a different process."""
    launcher = subprocess.Popen(["true"])
    launcher.wait()
    late = subprocess.run(
        [sys.executable, __file__, str(folder), "fixed"],
        env=os.environ | {"RANK": "0", "LAUNCHER": str(launcher.pid)},
        timeout=600,
    )
    assert late.returncode == 1 and not list(folder.iterdir())
    print("fixed: torchrun had ended before the rank asked, so the rank ends itself")


def main() -> None:
    if "RANK" in os.environ:
        return rank(Path(sys.argv[1]), fixed=sys.argv[2] == "fixed")
    if not Path("/proc/self/stat").exists():
        sys.exit("orphans.py asks Linux to end a process with its parent: it needs Linux")
    for how in ("bare", "fixed"):
        with tempfile.TemporaryDirectory() as name:
            operate(Path(name), how)
    with tempfile.TemporaryDirectory() as name:
        check_late_request(Path(name))


if __name__ == "__main__":
    main()
