"""Prints the environment variables by which torchrun gives each process its number.

Under torchrun, each rank collects its variables, and rank 0 prints a column for each rank. If
you start the program with plain python, it starts torchrun twice, as if this machine were two
nodes with two ranks each. Look for the columns in which RANK and LOCAL_RANK differ, and for
the variables that are equal on all ranks. The picture shows the run with two nodes.
"""

import os
import socket
import subprocess
import sys

import torch.distributed as dist

NODES, PER_NODE = 2, 2
WHO = ["RANK", "LOCAL_RANK", "GROUP_RANK"]  # GROUP_RANK is the number of the node
HOW_MANY = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"]
ATTEMPT = ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
WHERE = ["MASTER_ADDR", "MASTER_PORT"]
INK, MUTED = "#1f2937", "#52525b"
ROW, BAR = 60, 44  # in the picture, the height of a rank and the width of an operation


def text(x: float, y: float, words: str, colour: str, size: int, anchor: str = "middle") -> str:
    style = f'fill="{colour}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" {style}/>'


def draw(columns: list[dict[str, str]]) -> str:
    """Draw nodes and ranks on the left, then from left to right the steps of all ranks."""
    line, top, bottom = f'fill="none" stroke="{MUTED}"', 58, 58 + ROW * len(columns)
    parts = []
    for node in sorted({int(column["GROUP_RANK"]) for column in columns}):
        y = top + node * PER_NODE * ROW
        parts.append(box(1, y, 172, PER_NODE * ROW - 6, line))
        parts.append(text(87, y + 15, f"node {node}: one torchrun", MUTED, 12))
    for column in columns:
        rank, local_rank = column["RANK"], column["LOCAL_RANK"]
        y = top + int(rank) * ROW + 21 - 9 * int(local_rank)
        parts.append(box(10, y, 154, 38, 'fill="#15803d"'))
        parts.append(text(87, y + 16, f"RANK {rank}", "#ffffff", 13))
        parts.append(
            text(87, y + 32, f"LOCAL_RANK {local_rank}: GPU {local_rank}", "#ffffff", 12)
        )
        parts.append(f'<path d="M164 {y + 19}H430M546 {y + 19}H698" {line} stroke-width="2"/>')
        parts.append(box(430, y + 2, 116, 34, line))
        parts.append(text(488, y + 24, f"data of rank {rank}", INK, 12))
    bars = [(210, "TCPStore", "#7c3aed"), (344, "broadcast", "#0b6e99")]
    bars += [(592, "all-reduce", "#c2410c")]
    for x, words, colour in bars:
        parts.append(box(x, top, BAR, bottom - top - 6, f'fill="{colour}"'))
        middle = (top + bottom - 6) / 2
        parts.append(f'<g transform="translate({x + 28} {middle:g}) rotate(-90)">')
        parts.append(text(0, 0, words, "#ffffff", 15) + "</g>")
    steps = ["meet at one address", "same start", "different work", "one result"]
    for number, (x, words) in enumerate(zip((232, 366, 488, 614), steps, strict=True), 1):
        parts.append(text(x, 24, f"step {number}", INK, 14))
        parts.append(text(x, 43, words, MUTED, 12))
    size = f'viewBox="0 0 700 {bottom}" font-family="system-ui, sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, *parts, "</svg>", ""])


def report() -> None:
    """Print the variables of all ranks, with a column for each rank."""
    names = WHO + HOW_MANY + ATTEMPT
    columns: list = [None] * dist.get_world_size()
    dist.all_gather_object(columns, {name: os.environ[name] for name in names + WHERE})
    if dist.get_rank() == 0:
        for name in names:
            print(f"{name:26}", *(f"{column[name]:>3}" for column in columns))
        for name in WHERE:  # their values differ between runs, and not between ranks
            assert len({column[name] for column in columns}) == 1
        for column in columns:  # the ranks of a node follow the ranks of the node before it
            rank, local_rank, node = (int(column[name]) for name in WHO)
            assert rank == node * int(column["LOCAL_WORLD_SIZE"]) + local_rank
        print("MASTER_ADDR and MASTER_PORT: equal on all ranks")
        if int(columns[0]["GROUP_WORLD_SIZE"]) == NODES:
            with open("what_torchrun_sets.svg", "w", encoding="utf-8") as file:
                file.write(draw(columns))


def status_of(agents: list[subprocess.Popen]) -> int:
    """Return 1 if one of the agents fails, and 0 if none fails."""
    return int(any(agent.wait(timeout=600) for agent in agents))


def run_agents() -> int:
    """Start an agent for each node, as you would in the shells of two machines."""
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
            agent.terminate()  # does nothing if the agent has exited


def main() -> None:
    dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
    report()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(run_agents())
