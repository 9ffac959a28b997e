"""Who hears a signal that a launcher is sent: the ranks, or nobody?

Kubernetes and `docker stop` send SIGTERM to the first process of a container, and to no other.
Each launcher here starts two ranks that only listen; then the launcher alone is sent a signal,
and afterwards the ranks that still run are counted.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from socket import create_server

ME = Path(__file__).resolve()
ALSO = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
LAUNCHERS = [
    ("python by_hand.py --nproc-per-node=2 {rank}", "SIGTERM"),
    ("torchrun --standalone --nproc-per-node=2 {rank}", "SIGTERM"),
    ("torchrun --standalone --nproc-per-node=2 {rank}", "SIGUSR1"),
    (f"torchrun {ALSO} --standalone --nproc-per-node=2 {{rank}}", "SIGUSR1"),
    ("bash -c 'torchrun --standalone --nproc-per-node=2 {rank}; true'", "SIGTERM"),
    ("deepspeed --quiet --num_gpus=2 --master_port={port} {rank}", "SIGTERM"),
]


def listen(folder: Path) -> None:
    """What a rank does: say that it is there, note every signal, leave soon after one."""
    number = os.environ["RANK"]
    heard: list[str] = []
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(getattr(signal, name), lambda n, _: heard.append(signal.Signals(n).name))
    (folder / f"pid{number}").write_text(f"{os.getpid()} {os.getppid()}")
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not heard:
        time.sleep(0.05)
    time.sleep(0.5)  # the launcher must wait for us, as it must for a save
    (folder / f"heard{number}").write_text(" ".join(sorted(set(heard))))


def runs(pid: int) -> bool:
    """Whether a process is there and is no mere entry for somebody to collect."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --8<-- [start:try]
def attempt(command: str, name: str, folder: Path) -> str:
    """Start two ranks, signal their launcher, tell what came of it."""
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = shlex.split(command.format(rank=f"{ME} {folder}", port=port))
    launcher = subprocess.Popen(words, cwd=ME.parent, stderr=subprocess.DEVNULL, stdout=2)
    pids = [folder / f"pid{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in pids):
        if launcher.poll() is not None:
            raise SystemExit(f"{words[0]} left with {launcher.returncode} and started nothing")
        time.sleep(0.05)
    launcher.send_signal(getattr(signal, name))
    status = launcher.wait(60)
    known = [[int(word) for word in path.read_text().split()] for path in pids]
    left = [pid for pid, _ in known if runs(pid)]
    heard = {path.read_text() for path in folder.glob("heard*")} - {""}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    while any(runs(pid) for pids in known for pid in pids):  # who started them leaves as well
        time.sleep(0.05)
    end = f"killed by {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    return f"{', '.join(heard) or 'nothing':9} {len(left)}     {end}"


# --8<-- [end:try]


def main() -> None:
    if len(sys.argv) > 1:
        return listen(Path(sys.argv[-1]))  # DeepSpeed puts --local_rank before it
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        folders = [Path(folder, str(number)) for number in range(len(LAUNCHERS))]
        for each in folders:
            each.mkdir()
        told = list(pool.map(attempt, *zip(*LAUNCHERS, strict=True), folders))
    print("sent     heard     left  the launcher's end")
    for (command, name), line in zip(LAUNCHERS, told, strict=True):
        print(f"{name:8} {line}\n         {command.format(rank='RANK', port='PORT')}")
    assert [line.split()[0] for line in told] == [
        "SIGTERM", "SIGTERM", "nothing", "SIGUSR1", "nothing", "nothing",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
