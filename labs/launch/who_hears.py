"""Sends a signal to seven launchers, and shows whether their ranks receive it.

Kubernetes and `docker stop` send SIGTERM only to the first process of a container, which is
often a launcher. Here each launcher starts two ranks that wait for a signal. The program
signals the launcher alone, and then counts the ranks that are still running.
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
MORE = "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1"
LAUNCHERS = [  # the command, and the signal that it is sent
    ("python by_hand.py --nproc-per-node=2 {rank}", "SIGTERM"),
    ("torchrun --standalone --nproc-per-node=2 {rank}", "SIGTERM"),
    ("torchrun --standalone --nproc-per-node=2 {rank}", "SIGUSR1"),
    (f"torchrun {MORE} --standalone --nproc-per-node=2 {{rank}}", "SIGUSR1"),
    ("bash -c 'torchrun --standalone --nproc-per-node=2 {rank}; true'", "SIGTERM"),
    ("deepspeed --quiet --num_gpus=2 --master_port={port} {rank}", "SIGTERM"),
    (
        "accelerate launch --config_file accelerate/two_ranks.yaml "
        "--main_process_port={port} {rank}",
        "SIGTERM",
    ),
]


def wait_for_signal(folder: Path) -> None:
    """What each rank does: write its process ID, and record the signals that it receives."""
    number = os.environ["RANK"]
    received: list[str] = []
    for name in ("SIGTERM", "SIGUSR1"):
        signal.signal(
            getattr(signal, name), lambda n, _: received.append(signal.Signals(n).name)
        )
    (folder / f"pid{number}").write_text(f"{os.getpid()} {os.getppid()}")
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and not received:
        time.sleep(0.05)
    time.sleep(0.5)  # like a short save, for which the launcher must wait
    (folder / f"received{number}").write_text(" ".join(sorted(set(received))))


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# --8<-- [start:try]
def attempt(command: str, name: str, folder: Path) -> tuple[str, int, str]:
    """Start a launcher with two ranks, and send the signal `name` to the launcher alone.

    Return the signals that the ranks received, the number of ranks that are still running
    after the launcher has ended, and how the launcher ended.
    """
    with create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = shlex.split(command.format(rank=f"{ME} {folder}", port=port))
    launcher = subprocess.Popen(words, cwd=ME.parent, stderr=subprocess.DEVNULL, stdout=2)
    files = [folder / f"pid{rank}" for rank in range(2)]
    while not all(path.exists() and path.read_text() for path in files):
        if launcher.poll() is not None:
            raise SystemExit(f"{words[0]} ended before its ranks ran")
        time.sleep(0.05)
    launcher.send_signal(getattr(signal, name))
    status = launcher.wait(60)
    pids = [[int(word) for word in path.read_text().split()] for path in files]
    running = [pid for pid, _ in pids if is_running(pid)]
    received = {path.read_text() for path in folder.glob("received*")} - {""}
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    while any(is_running(pid) for pair in pids for pid in pair):  # and their parents
        time.sleep(0.05)
    end = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return ", ".join(received) or "nothing", len(running), end


# --8<-- [end:try]


def main() -> None:
    if len(sys.argv) > 1:
        return wait_for_signal(Path(sys.argv[-1]))  # DeepSpeed adds --local_rank before it
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        folders = [Path(folder, str(number)) for number in range(len(LAUNCHERS))]
        for each in folders:
            each.mkdir()
        results = list(pool.map(attempt, *zip(*LAUNCHERS, strict=True), folders))
    print("sent     received  still running  the launcher")
    for (command, name), (received, running, end) in zip(LAUNCHERS, results, strict=True):
        print(f"{name:8} {received:9} {running} of 2 ranks   {end}")
        print(f"         {command.format(rank='RANK', port='PORT')}")
    assert [received for received, _, _ in results] == [
        "SIGTERM", "SIGTERM", "nothing", "SIGUSR1", "nothing", "nothing", "SIGTERM",
    ]  # fmt: skip
    for received, running, end in results:
        # a launcher that forwards the signal waits for its ranks, and ends by itself
        forwards = received != "nothing"
        assert (running == 0) == forwards == end.startswith("exit status"), results


if __name__ == "__main__":
    main()
