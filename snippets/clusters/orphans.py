"""torchrun itself is killed, and its ranks live on: nobody is left to end them.

The out-of-memory killer, an operator's kill -9 or a lost login session may hit the launcher.
Its ranks have sessions of their own; SIGKILL asks the launcher nothing, so it passes nothing
on. They keep memory, GPUs and ports, and the next job fails for no reason that it could see. In
a container or under Slurm the whole group ends together. Elsewhere a rank can ask for it: Linux
sends a signal of its choice when its parent ends. A rank that asks too late, when the launcher
is gone already, would wait for that signal for ever: it compares its parent with a number that
the launcher handed down.

    torchrun's ranks here are this same file; they need no torch, so they import none
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
    """Ask to be killed when the process that started this one ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["LAUNCHER"]):  # it ended before we could ask
        os._exit(1)


def rank(folder: Path, fixed: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as a program does that saves first
    if fixed:
        end_with_parent()  # line one of the program, before torch is imported
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
        print(f"{how}: torchrun is killed; of its 2 ranks {left} live on")
        assert left == (2 if how == "bare" else 0) and all(own_sessions)
    finally:
        torchrun.kill()
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def ask_too_late(folder: Path) -> None:
    """Start a rank whose launcher is gone already, so another process is its parent."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    late = subprocess.run(
        [sys.executable, __file__, str(folder), "fixed"],
        env=os.environ | {"RANK": "0", "LAUNCHER": str(gone.pid)},
        timeout=600,
    )
    assert late.returncode == 1 and not list(folder.iterdir())
    print("fixed: torchrun was gone before the rank could ask; the rank ends")


def main() -> None:
    if "RANK" in os.environ:
        return rank(Path(sys.argv[1]), fixed=sys.argv[2] == "fixed")
    if not Path("/proc/self/stat").exists():
        sys.exit("orphans.py asks Linux to end a process with its parent: it needs Linux")
    for how in ("bare", "fixed"):
        with tempfile.TemporaryDirectory() as name:
            operate(Path(name), how)
    with tempfile.TemporaryDirectory() as name:
        ask_too_late(Path(name))


if __name__ == "__main__":
    main()
