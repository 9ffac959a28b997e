"""What torchrun starts, and which environment variables tell each process who it is.

Under torchrun the program prints the variables that its rank found, beside the other ranks'.
Started with plain python it plays two nodes of two ranks each on this machine. Look for the
columns in which RANK and LOCAL_RANK differ, and for the variables that are equal everywhere.
"""

import os
import socket
import subprocess
import sys

import torch.distributed as dist

NODES, PER_NODE = 2, 2
WHO = ["RANK", "LOCAL_RANK", "GROUP_RANK"]  # the group of torchrun's agent: the node
HOW_MANY = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
ATTEMPT = ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
WHERE = ["MASTER_ADDR", "MASTER_PORT"]


def report() -> None:
    """Print the variables of all ranks, a column for each rank."""
    names = WHO + HOW_MANY + ATTEMPT
    columns: list = [None] * dist.get_world_size()
    dist.all_gather_object(columns, {name: os.environ[name] for name in names + WHERE})
    if dist.get_rank() == 0:
        for name in names:
            print(f"{name:26}", *(f"{column[name]:>3}" for column in columns))
        for name in WHERE:  # differ from run to run, never from rank to rank
            assert len({column[name] for column in columns}) == 1
        print("MASTER_ADDR and MASTER_PORT: equal on all ranks")


def status_of(agents: list[subprocess.Popen]) -> int:
    """A failure, 1, if one of them fails."""
    return int(any(agent.wait(timeout=600) for agent in agents))


def run_agents() -> int:
    """Start an agent for each node, as two shells on two machines would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert status_of([subprocess.Popen(["true"]), subprocess.Popen(["false"])]) == 1
    agents = []
    for node in range(NODES):
        options = [f"--nnodes={NODES}", f"--node-rank={node}", f"--nproc-per-node={PER_NODE}"]
        address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *address, __file__]
        agents.append(subprocess.Popen(command))
    try:
        return status_of(agents)
    finally:
        for agent in agents:
            agent.terminate()  # nothing to do where it has ended


def main() -> None:
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    report()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(run_agents())
