"""A Slurm cluster on this machine for as long as a command runs: the real slurmctld and slurmd.

    python rehearse.py --nodes 2 sbatch --wait several_nodes.sh

Each node is a slurmd of its own with a port of its own; jobs, steps, signals and requeueing are
Slurm's. Needs Linux, root, and Debian's packages slurm-wlm and munge. Everything lies in a
temporary folder and is gone afterwards, also after Ctrl-C.
"""

import argparse
import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # where a user's PATH may not look
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# --8<-- [start:configuration]
def configuration(folder: Path, nodes: int, ports: list[int], gpus: int = 0) -> str:
    """slurm.conf for `nodes` nodes that are all this host, each with `gpus` pretended GPUs.

    Waits are short in it. A requeued job waits for `cred_expire`, 120 s by default; and
    `sbatch --wait` sleeps for 2, 8, 32 s, or for 2 s if a MinJobAge this short would
    have the job forgotten meanwhile.
    """
    host = socket.gethostname()
    listen = f"{ports[1]}-{ports[-1]}"
    generic = f" Gres=gpu:{gpus}" if gpus else ""
    select = "select/cons_tres\nSelectTypeParameters=CR_CPU" if gpus else "select/linear"
    return f"""
ClusterName=rehearsal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=20
MinJobAge=5
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
GresTypes=gpu
SelectType={select}
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port={listen} CPUs=4{generic}
PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""".lstrip()


# --8<-- [end:configuration]


def consecutive_ports(count: int) -> list[int]:
    """One free port, then `count` in a row: slurm.conf names the nodes' ports as a range."""
    for _ in range(100):
        first, controller = free_ports(2)
        wanted = [first + place for place in range(count)]
        try:
            with contextlib.ExitStack() as held:
                for port in wanted:
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        if controller not in wanted and wanted[-1] < 65536:
            return [controller, *wanted]
    raise SystemExit("no free ports")


def in_folder(folder: Path) -> list[int]:
    """All processes that were started with `folder` in their environment or command."""
    found, mark = [], str(folder).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and (
                mark in (entry / "environ").read_bytes()
                or mark in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def cluster(nodes: int, gpus: int = 0):
    """Start munged, slurmctld and a slurmd for each node; yield what Slurm's commands need."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    daemons: list[subprocess.Popen] = []
    try:
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o400)
        (folder / "slurm.conf").write_text(
            configuration(folder, nodes, consecutive_ports(nodes), gpus)
        )
        for number in range(
            gpus
        ):  # Slurm hands out device files: these are copies of /dev/null
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else ""
        )
        env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
        said = (folder / "daemons.log").open("wb")

        def start(*command: str) -> None:
            daemons.append(
                subprocess.Popen(
                    command, env=env, stdout=said, stderr=said, start_new_session=True
                )
            )

        start(
            "munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
            f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed",
        )  # fmt: skip
        wait_until((folder / "munge.socket").exists, folder, "munged")
        start("slurmctld", "-D")
        for node in range(1, nodes + 1):
            start("slurmd", "-D", "-N", f"n{node}")

        def idle() -> bool:
            seen = subprocess.run(
                ["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True
            )
            return seen.stdout.split() == ["idle", str(nodes)]

        wait_until(idle, folder, "the nodes")
        yield env
    finally:
        not_again()
        # Slurm's own shutdown ends jobs; what is left after it is killed
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        for _ in range(50):
            left = in_folder(folder)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in daemons:
                daemon.poll()
            if not left:
                break
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def not_again() -> None:
    """From here on everything is taken down, however often somebody presses Ctrl-C."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def wait_until(ready, folder: Path, what: str, seconds: float = 60) -> None:
    """Wait until `ready()`; say what the daemons said if that does not come."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            for log in sorted(folder.glob("*.log")):
                print(
                    f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}",
                    file=sys.stderr,
                )
            raise SystemExit(f"{what} did not start within {seconds:.0f} s")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs to pretend on each node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what to run in the cluster")
    options = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.name != "posix" or os.geteuid() != 0:
        why = f"{', '.join(missing)} is not installed" if missing else "you are not root"
        print(
            f"no rehearsal: {why} (Debian: apt install slurm-wlm munge, as root)",
            file=sys.stderr,
        )
        return 1
    if not options.command:
        parser.error("name a command, such as: sinfo")

    def leave(number: int, frame: object) -> None:
        not_again()
        raise SystemExit(128 + number)

    for number in ENDS:
        signal.signal(number, leave)
    with cluster(options.nodes, options.gpus) as env:
        return subprocess.run(options.command, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
