"""Slurm starts one task, and the program waits for two: --ntasks=1 with --ntasks-per-node=2.

Slurm's manual says that --ntasks takes precedence and that --ntasks-per-node is then only a
maximum. A program that computes its world size from SLURM_NTASKS_PER_NODE waits for tasks that
Slurm never starts. A program that reads SLURM_NTASKS does not wait, but it uses one GPU of two.
No Slurm runs here: `tasks_of` sets the variables as the manual describes, and forks the tasks.

    (no flag)   two ways to read the variables, under three job scripts
    --fix       every task first compares the variables, and stops with one sentence

Linux and macOS only.
"""

import os
import re
import signal
import socket
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

SCRIPTS = {
    "--nodes=1 --ntasks-per-node=2": (1, None, 2),
    "--nodes=1 --ntasks=1 --ntasks-per-node=2": (1, 1, 2),
    "--nodes=1 --ntasks=2 --ntasks-per-node=2": (1, 2, 2),
}


def tasks_of(nodes: int, ntasks: int | None, per_node: int) -> list[dict[str, str]]:
    """Return the environment of each task that srun starts, as the manual of sbatch says."""
    count = nodes * per_node if ntasks is None else ntasks  # --ntasks takes precedence
    shared = {
        "SLURM_NTASKS": str(count),
        "SLURM_NTASKS_PER_NODE": str(per_node),
        "SLURM_JOB_NUM_NODES": str(nodes),
    }
    return [shared | {"SLURM_PROCID": str(number)} for number in range(count)]


# --8<-- [start:worlds]
def from_tasks_per_node() -> int:
    return int(os.environ["SLURM_JOB_NUM_NODES"]) * int(os.environ["SLURM_NTASKS_PER_NODE"])


def from_tasks() -> int:
    return int(os.environ["SLURM_NTASKS"])


# --8<-- [end:worlds]


# --8<-- [start:check]
def check_tasks() -> None:
    """Stop with one sentence if Slurm started fewer tasks than --ntasks-per-node requests."""
    started, wanted = from_tasks(), from_tasks_per_node()
    if started != wanted:
        sys.exit(
            f"Slurm started {started} task(s), but --ntasks-per-node and --nodes ask for "
            f"{wanted}: remove --ntasks from the job script"
        )


# --8<-- [end:check]


def task(world_size: int, port: int) -> str:
    """Join the group, sum a number of each rank, and return a line about the result."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": os.environ["SLURM_PROCID"], "WORLD_SIZE": str(world_size)}
    limit = 3 if world_size > from_tasks() else 60  # short only if the wait must fail
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=limit))
    except dist.DistError as error:
        text = re.sub(r"after (\d+)", r"after ≈\1", str(error).splitlines()[0])
        return f"{type(error).__name__}: {text}"
    total = torch.tensor(1.0 + dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return f"world size {world_size}, the sum over the ranks is {total.item():g}"


def run(environments: list[dict[str, str]], world: str, check: bool) -> list[str]:
    """Fork the tasks as srun would start them, and return the line of each task."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for environment in environments:
            if pid := os.fork():
                pids.append(pid)
                continue
            signal.alarm(600)  # no task outlives this
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # c10d's log
            os.environ |= environment
            try:
                if check:
                    check_tasks()
                text = task(globals()[world](), port)
            except SystemExit as stop:
                text = f"stopped: {stop}"
            Path(folder, environment["SLURM_PROCID"]).write_text(text)
            os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        return [Path(folder, str(number)).read_text() for number in range(len(environments))]


def check_two_nodes() -> None:
    """Check the same options for two nodes, without a process for each task."""
    for options, count, stops in (((2, None, 2), 4, False), ((2, 2, 2), 2, True)):
        environments, message = tasks_of(*options), ""
        with mock.patch.dict(os.environ, environments[-1]):
            try:
                check_tasks()
            except SystemExit as stop:
                message = str(stop)
        assert len(environments) == count
        assert ("2 task(s), but" in message and "ask for 4:" in message) == stops, message


def main() -> None:
    check_two_nodes()
    check = "--fix" in sys.argv
    results = {}
    for script, options in SCRIPTS.items():
        environments = tasks_of(*options)
        print(f"{script}: Slurm starts {len(environments)} task(s)")
        for world in (
            ("from_tasks_per_node",) if check else ("from_tasks_per_node", "from_tasks")
        ):
            reports = run(environments, world, check)
            assert len({*reports}) == 1, reports  # all tasks report the same
            results[script, world] = reports[0]
            print(f"  {world}: {results[script, world]}", flush=True)
    right, wrong, both = SCRIPTS
    whole = "world size 2, the sum over the ranks is 3"
    for script in (right, both):
        assert all(report == whole for (name, _), report in results.items() if name == script)
    waits = results[wrong, "from_tasks_per_node"]
    if check:
        assert waits.startswith("stopped: Slurm started 1 task(s)"), waits
        # two of four tasks start on two nodes, and each of the two must stop
        for report in run(tasks_of(2, 2, 2), "from_tasks_per_node", check):
            assert report.startswith("stopped: Slurm started 2 task(s)"), report
        return
    assert "1/2 clients joined" in waits, waits
    # nothing is raised here: one task trains alone, and the second GPU is idle
    assert results[wrong, "from_tasks"] == "world size 1, the sum over the ranks is 1"


if __name__ == "__main__":
    main()
