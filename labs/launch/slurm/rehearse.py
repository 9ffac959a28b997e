"""Starts a Slurm cluster on this machine, runs a command in it, and removes the cluster.

    python rehearse.py --nodes 2 sbatch --wait several_nodes.sh

The cluster consists of a real slurmctld, and of one real slurmd with its own port per node. So
jobs, job steps, signals and requeueing behave as in any Slurm cluster. The program needs Linux,
root, and the Debian packages slurm-wlm and munge. All files are in a temporary folder, which is
removed at the end, also after Ctrl-C.
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
FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # may be missing in the PATH of a user
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def free_ports(count: int) -> list[int]:
    """Return ports on which no process listens now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# --8<-- [start:configuration]
def configuration(folder: Path, nodes: int, ports: list[int], gpus: int = 0) -> str:
    """Return a slurm.conf for `nodes` nodes on this host, each with `gpus` imitated GPUs.

    The waiting times are short. A requeued job waits for `cred_expire`, which is 120 s by
    default. `sbatch --wait` checks the job after 2, 8 and 32 s, or every 2 s if MinJobAge is
    so short that Slurm could delete the job in between.
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
    """Return one free port, and then `count` consecutive free ports for the nodes."""
    for _ in range(100):
        first, controller = free_ports(2)
        wanted = [first + place for place in range(count)]
        try:
            with contextlib.ExitStack() as stack:
                for port in wanted:
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            continue
        if controller not in wanted and wanted[-1] < 65536:
            return [controller, *wanted]
    raise SystemExit(f"found no {count} consecutive free ports: try again")


def processes_with(folder: Path) -> list[int]:
    """Return the processes that have `folder` in their environment or in their command."""
    found, needle = [], str(folder).encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(entry.name) != os.getpid() and (
                needle in (entry / "environ").read_bytes()
                or needle in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def cluster(nodes: int, gpus: int = 0):
    """Start munged, slurmctld and one slurmd per node. Yield the environment of a command."""
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
        # Slurm needs a device file for each GPU; these are copies of /dev/null
        for number in range(gpus):
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (folder / "gres.conf").write_text(
            f"NodeName=n[1-{nodes}] Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else ""
        )
        env = os.environ | {"SLURM_CONF": f"{folder}/slurm.conf"}
        log = (folder / "daemons.log").open("wb")

        def start(*command: str) -> None:
            daemons.append(
                subprocess.Popen(
                    command, env=env, stdout=log, stderr=log, start_new_session=True
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
        ignore_signals()
        # Slurm ends its jobs when it shuts down; kill every process that still runs afterwards
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
        for _ in range(50):
            left = processes_with(folder)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for daemon in daemons:
                daemon.poll()
            if not left:
                break
            time.sleep(0.1)
        shutil.rmtree(folder, ignore_errors=True)


def ignore_signals() -> None:
    """Ignore further signals, so that the cluster is removed even if Ctrl-C is repeated."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)


def wait_until(ready, folder: Path, what: str, seconds: float = 60) -> None:
    """Wait until `ready()` is true. After a timeout, print the logs of the daemons."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            for log in sorted(folder.glob("*.log")):
                print(
                    f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}",
                    file=sys.stderr,
                )
            raise SystemExit(f"{what} did not start within {seconds:.0f} s: see the logs above")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--gpus", type=int, default=0, help="number of imitated GPUs per node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command to run")
    options = parser.parse_args()
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", ""), *FOLDERS])
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing or os.name != "posix" or os.geteuid() != 0:
        why = f"{', '.join(missing)} is not installed" if missing else "you are not root"
        print(
            f"cannot start a cluster: {why} (on Debian, as root: apt install slurm-wlm munge)",
            file=sys.stderr,
        )
        return 1
    if not options.command:
        parser.error("the command is missing, for example: sinfo")

    def leave(number: int, frame: object) -> None:
        ignore_signals()
        raise SystemExit(128 + number)

    for number in ENDS:
        signal.signal(number, leave)
    with cluster(options.nodes, options.gpus) as env:
        return subprocess.run(options.command, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
